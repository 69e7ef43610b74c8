// The kernels of prefill against their C twins, on the simulator (default) or a GPU (SALA_TEST_GPU=N).
#define SALA_IMPLEMENTATION
#include "../sala.h"

#include "check.h"
#include "device.h"
#include "kernels_gemm.h"

#include "prefill_attend.h"
#include "prefill_fp4.h"
#include "prefill_gemm.h"

#include "kernels_four.h"

#include "prefill_gla.h"
#include "prefill_select.h"

int main(int argc, char **argv) {
    static const check_entry tests[] = {PREFILL_GEMM_TESTS,
                                        PREFILL_FP4_TESTS,
                                        TEST(prefill_gla_twin),
                                        TEST(prefill_gla_groups),
                                        TEST(prefill_gla_normed),
                                        TEST(prefill_gla_bits),
                                        TEST(prefill_gla_copies),
                                        TEST(prefill_gla_long),
                                        TEST(prefill_store),
                                        TEST(prefill_select_group_1),
                                        TEST(prefill_select_group_2),
                                        TEST(prefill_select_group_3),
                                        TEST(prefill_select_group_8),
                                        TEST(prefill_select_group_16),
                                        TEST(prefill_select_long),
                                        TEST(prefill_attend_group_1),
                                        TEST(prefill_attend_group_2),
                                        TEST(prefill_attend_group_3),
                                        TEST(prefill_attend_group_8),
                                        TEST(prefill_attend_group_16),
                                        TEST(prefill_attend_ragged),
                                        TEST(prefill_attend_dense),
                                        TEST(prefill_attend_long_lists),
                                        TEST(prefill_attend_far_pages),
                                        FOUR_TESTS};
    if (!device_exists()) {
        printf("skipped: no simulator (build/libsala_sim.so) and no SALA_TEST_GPU\n");
        printf("0 passed, 0 failed\n");
        return 0;
    }
    device_units = 3; // of the products' tests
    int status = check_main(tests, (int)(sizeof tests / sizeof tests[0]), argc, argv);
    device_close();
    return status;
}
