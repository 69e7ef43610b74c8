# sala: make (the program), make run, make test, make help
#
# gcc and make are enough. Every flag below says why it is there.

CC       ?= cc
CXX      ?= c++
ARCH     ?= native
OPT      ?= -O3
WARN      = -Wall -Wextra -Wpedantic -Wshadow -Werror -Wno-psabi
# -std=gnu11: C11 with POSIX names. -march: SIMD and fused multiply-add (10x). -ffp-contract=off: the
# bit-exact promises want every fma to be written as one. -Wno-psabi: a note of GCC on wide vectors. -MMD: rebuild when a header changes.
CFLAGS    = -std=gnu11 $(OPT) -march=$(ARCH) -ffp-contract=off $(WARN) -g -MMD $(EXTRA)
LDLIBS    = -lm -lpthread -ldl
# EXTRA adds flags to everything: make test EXTRA="-fsanitize=address,undefined" OPT=-O1
EXTRA    ?=
B        ?= build
SALA     ?= sala

# test_x is tests/test_x.c; test_x_fp32 is the same with FP32 activations, to meet the float64 reference.
TESTS := $(patsubst tests/%.c,%,$(wildcard tests/test_*.c)) test_model_fp32

all: $(SALA)

$(SALA): main.c sala.cu kernels.h | $(B)
	$(CC) $(CFLAGS) -MF $(B)/sala.d -o $@ main.c $(LDLIBS)

run: $(SALA)
	./$(SALA) run

$(B):
	mkdir -p $(B)

$(B)/%: tests/%.c sala.cu kernels.h | $(B)
	$(CC) $(CFLAGS) -MF $@.d -o $@ $< $(LDLIBS)

$(B)/%_fp32: tests/%.c sala.cu kernels.h | $(B)
	$(CC) $(CFLAGS) -DSALA_ACT_FP32 -MF $@.d -o $@ $< $(LDLIBS)

# The fuzz targets as plain programs that replay their corpus: past findings stay found.
FUZZ := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))

$(B)/fuzz_%: tests/fuzz/fuzz_%.c sala.cu kernels.h | $(B)
	$(CC) $(CFLAGS) -DREPLAY -MF $@.d -o $@ $< $(LDLIBS)

-include $(B)/*.d

test: $(SALA) $(addprefix $(B)/,$(TESTS) $(FUZZ))
	SALA=./$(SALA) EXTRA="$(EXTRA)" sh tests/run.sh $(addprefix $(B)/,$(TESTS) $(FUZZ))

clean:
	rm -rf $(B) sala

format:
	clang-format -i sala.h kernels.h main.c tools/*.c tools/*.h tests/*.c tests/*.h tests/fuzz/*.c

help:
	@echo "make          build ./sala"
	@echo "make run      generate a story with models/sala-tiny"
	@echo "make test     build and run all tests that need no GPU"
	@echo "make format   apply .clang-format"
	@echo "make clean    remove what was built"
	@echo "variables: CC, ARCH=native|x86-64-v3|..., OPT=-O3, EXTRA=..., B=build, SALA=sala"

.PHONY: all run test clean format help
.DELETE_ON_ERROR:
