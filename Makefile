# sala: make (the program), make run, make test, make help
#
# gcc and make are enough. Every flag below says why it is there.

CC       ?= cc
CXX      ?= c++
ARCH     ?= native
OPT      ?= -O3
WARN      = -Wall -Wextra -Wpedantic -Wshadow $(WERROR) -Wno-psabi
# -std=gnu11: C11 with POSIX names. -march: SIMD and fused multiply-add (10x). -ffp-contract=off: the
# bit-exact promises want every fma to be written as one. -Wno-psabi: a note of GCC on wide vectors. -MMD: rebuild when a header changes.
CFLAGS    = -std=gnu11 $(OPT) -march=$(ARCH) -ffp-contract=off $(WARN) -g -MMD $(EXTRA)
# -ldl: dlopen lies in a library of its own with glibc before 2.34.
LDLIBS    = -lm -lpthread -ldl
# EXTRA adds flags to everything: make test EXTRA="-fsanitize=address,undefined" OPT=-O1
EXTRA    ?=
# CI says WERROR=-Werror. Not for everybody: other compilers, other (false) warnings.
WERROR   ?=
B        ?= build
SALA     ?= sala

# test_x is tests/test_x.c; test_x_fp32 is the same with FP32 activations, to meet the float64 reference.
TESTS := $(patsubst tests/%.c,%,$(wildcard tests/test_*.c)) test_model_fp32

all: $(SALA)

$(SALA): main.c sala.cu kernels.h | $(B)
	$(CC) $(CFLAGS) -MF $(B)/sala.d -o $@ main.c $(LDLIBS)

run: $(SALA)
	./$(SALA) run -m models/sala-tiny --draft models/sala-tiny-eagle3

# The quantiser needs LAPACKE and OpenBLAS (Debian: liblapacke-dev, libopenblas-dev).
LAPACKE := $(if $(shell printf '\043include <lapacke.h>\n\043include <cblas.h>\n' | $(CC) -E - >/dev/null 2>&1 && echo 1),-llapacke -lopenblas)

quantize: sala-quantize

sala-quantize: tools/quantize.c tools/gptq.h sala.h sala.cu kernels.h tools/cli.h | $(B)
	@test -n "$(LAPACKE)" || { echo "lapacke.h and cblas.h are missing: apt-get install liblapacke-dev libopenblas-dev" >&2; exit 1; }
	$(CC) $(CFLAGS) -MF $(B)/quantize.d -o $@ tools/quantize.c $(LAPACKE) $(LDLIBS)

$(B)/test_quantize: LDLIBS += $(LAPACKE)
$(B)/test_quantize: tools/quantize.c tools/gptq.h tools/cli.h

$(B):
	mkdir -p $(B)

# -DSALA_STATIC: the compiler leaves out what a test does not call, which makes most of them five times as fast to compile.
$(B)/%: tests/%.c sala.cu kernels.h | $(B)
	$(CC) $(CFLAGS) -DSALA_STATIC -MF $@.d -o $@ $< $(LDLIBS)

$(B)/%_fp32: tests/%.c sala.cu kernels.h | $(B)
	$(CC) $(CFLAGS) -DSALA_ACT_FP32 -DSALA_STATIC -MF $@.d -o $@ $< $(LDLIBS)

# The fuzz targets as plain programs that replay their corpus: past findings stay found.
FUZZ := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))

$(B)/fuzz_%: tests/fuzz/fuzz_%.c sala.cu kernels.h | $(B)
	$(CC) $(CFLAGS) -DREPLAY -DSALA_STATIC -MF $@.d -o $@ $< $(LDLIBS)

# What computes little is compiled quickly. (OPT on the command line is for all.)
QUICK := json settings checkpoint tokenizer formats sampler cuda_host draft_files quantized spec main api session bench
$(addprefix $(B)/test_,$(QUICK)) $(addprefix $(B)/,$(FUZZ)) $(B)/make_models $(B)/make_soar_set: OPT = -O1

# The CUDA simulator: the driver and NVRTC in one library. It and its tests need a C++ compiler; without
# one they are skipped.
SIM := $(if $(shell command -v $(CXX) 2>/dev/null),$(B)/libsala_sim.so)
SANITIZE = $(filter -fsanitize=address% -fsanitize=undefined% -fno-sanitize%,$(EXTRA))

$(B)/libsala_sim.so: tests/sim/sim.cpp tests/sim/sim.h | $(B)
	$(CXX) -std=c++17 -O2 -g -Wall -Wextra -Wpedantic -Wshadow -Werror -ffp-contract=off -fPIC -shared \
		-fvisibility=hidden $(SANITIZE) -o $@ tests/sim/sim.cpp -ldl

$(B)/test_sim $(B)/test_kernels $(B)/test_prefill $(B)/test_cuda $(B)/test_session: $(SIM)
$(B)/test_sim: tests/sim/selftest.cu tests/sim/selftest.h

-include $(B)/*.d

test: $(SALA) $(B)/make_models $(B)/make_soar_set $(addprefix $(B)/,$(TESTS) $(FUZZ))
	SALA=./$(SALA) MAKE_MODELS=$(B)/make_models MAKE_SOAR_SET=$(B)/make_soar_set SALA_SIM=$(B)/libsala_sim.so EXTRA="$(EXTRA)" sh tests/run.sh $(addprefix $(B)/,$(TESTS) $(FUZZ))

# Kernels for all targets, compiled by NVRTC without a GPU: registers, shared memory, spills.
check-kernels: $(B)/check_kernels
	$(B)/check_kernels

$(B)/check_kernels: tools/check_kernels.c sala.h sala.cu kernels.h | $(B)
	$(CC) $(CFLAGS) -MF $@.d -o $@ $< $(LDLIBS)

# Models with random numbers in the layouts of 4-bit checkpoints, see tools/make_models.c.
$(B)/make_models: tools/make_models.c tests/quant_files.h sala.h kernels.h | $(B)
	$(CC) $(CFLAGS) -MF $@.d -o $@ $< $(LDLIBS)

# Requests for sala bench --soar, see tools/make_soar_set.c.
$(B)/make_soar_set: tools/make_soar_set.c tools/soar.h tools/cli.h sala.h kernels.h | $(B)
	$(CC) $(CFLAGS) -DSALA_STATIC -MF $@.d -o $@ $< $(LDLIBS)

$(B)/fp4_probe: tools/fp4_probe.c sala.h sala.cu kernels.h | $(B)
	$(CC) $(CFLAGS) -MF $@.d -o $@ $< $(LDLIBS)

# Every deliberate fault of tests/sim/mutations.txt must be noticed by the kernel tests.
mutations: $(B)/test_kernels $(B)/test_prefill
	SALA_SIM=$(B)/libsala_sim.so sh tests/sim/mutate.sh $(B)/test_kernels

# Training of draft heads: needs PyTorch, which Debian has as python3-torch.
PYTHON ?= python3
draft-test: $(B)/draft_lib.so $(B)/draft_lib_fp32.so
	@for p in "$(PYTHON)" /usr/bin/python3; do \
		if "$$p" -c 'import torch' 2>/dev/null; then BUILD=$(B) exec "$$p" tests/test_train_draft.py $(WORDS); fi; done; \
		echo "make draft-test: there is no PyTorch: apt-get install python3-torch, or name a Python that has it: PYTHON=..." >&2; exit 1

$(B)/draft_lib.so $(B)/draft_lib_fp32.so: tests/draft_lib.c sala.cu kernels.h | $(B)
	$(CC) $(CFLAGS) $(if $(findstring fp32,$@),-DSALA_ACT_FP32) -DSALA_STATIC -fPIC -shared -MF $@.d -o $@ $< $(LDLIBS)

# The released weights, or a 4-bit copy of them, for whoever has them: make real-test MODEL=DIR
real-test: $(B)/real
	$(B)/real "$(MODEL)"

# 10,000 tokens of sala-tiny with every kind of draft, greedy and sampled, against plain decoding: minutes.
lossless-test: $(B)/lossless
	$(B)/lossless $(or $(DEVICE),auto)

# 2,000 requests in too little memory: cancelled, saved, loaded, with prefixes and drafts, each as it is alone.
soak-test: $(B)/soak
	$(B)/soak $(or $(REQUESTS),2000) $(SEED)

# sala-tiny's model in PyTorch against the engine, its trainer, a rehearsal of tools/tiny/h200.sh. What needs no torch
# is tools/tiny/test_tiny.py.
tiny-test: $(SALA) $(B)/sala_fp32
	@$(PYTHON) -c 'import torch, numpy' 2>/dev/null || { echo "make tiny-test: torch or numpy is missing: pip install torch numpy (the CPU's will do), or PYTHON=path/to/python3" >&2; exit 1; }
	SALA=$(SALA) SALA_FP32=$(B)/sala_fp32 $(PYTHON) tools/tiny/test_torch.py

$(B)/sala_fp32: main.c sala.cu kernels.h | $(B)
	$(CC) $(CFLAGS) -DSALA_ACT_FP32 -MF $@.d -o $@ main.c $(LDLIBS)

# What only a GPU can tell. STAGE: kernels, engine, sanitizer, needles, bench, prefill, four, spec, soar, reuse, dump, sessions, accuracy, train
# or all (the default).
gpu-test:
	sh tools/gpu_check.sh $(STAGE)

clean:
	rm -rf $(B) sala sala-quantize

format:
	clang-format -i sala.h sala.cu kernels.h main.c tools/*.c tools/*.h tests/*.c tests/*.h tests/fuzz/*.c \
		tests/sim/*.cpp tests/sim/*.h tests/sim/*.cu

help:
	@echo "make          build ./sala"
	@echo "make run      generate a story with models/sala-tiny"
	@echo "make quantize build ./sala-quantize (needs LAPACKE and OpenBLAS)"
	@echo "make test     build and run all tests that need no GPU"
	@echo "make check-kernels  compile all kernels for every target (needs NVRTC, no GPU)"
	@echo "make real-test MODEL=DIR  the released weights against what others saw them do"
	@echo "make soak-test      2,000 requests in too little memory, each as it is alone (REQUESTS=2000 SEED=1)"
	@echo "make lossless-test  10,000 tokens with every kind of draft against plain decoding (DEVICE=cpu|cuda)"
	@echo "make draft-test     training of draft heads (needs PyTorch)"
	@echo "make tiny-test      how sala-tiny was made: PyTorch against the engine, the trainer (needs torch; PYTHON=python3)"
	@echo "make gpu-test STAGE=all  what only a GPU can tell (kernels engine sanitizer needles bench prefill four spec soar reuse dump sessions accuracy train)"
	@echo "make mutations      plant faults in the kernels and see that the tests notice"
	@echo "make format   apply .clang-format"
	@echo "make clean    remove what was built"
	@echo "variables: CC, ARCH=native|x86-64-v3|..., OPT=-O3, EXTRA=..., B=build, SALA=sala"

.PHONY: all run quantize test real-test lossless-test soak-test draft-test tiny-test check-kernels mutations gpu-test clean format help
.DELETE_ON_ERROR:
