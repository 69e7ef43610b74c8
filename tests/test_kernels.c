// Every kernel of decoding against its C twin, on the simulator (default) or a GPU (SALA_TEST_GPU=N).
#define SALA_IMPLEMENTATION
#include "../sala.h"

#include "check.h"
#include "device.h"

#include "kernels_gemm.h"
#include "kernels_gla.h"
#include "kernels_sample.h"
#include "kernels_sparse.h"

#include "kernels_draft.h"

int main(int argc, char **argv) {
    static const check_entry tests[] = {TEST(test_norm),
                                        TEST(test_gemm),
                                        TEST(test_gemm_swiglu),
                                        TEST(test_gemm_norm),
                                        TEST(test_gemm_alone),
                                        TEST(test_gemm_nan),
                                        TEST(test_gemm_nvfp4),
                                        TEST(test_gemm_small),
                                        TEST(test_gemm_int4),
                                        TEST(test_gla_verify_twin),
                                        TEST(test_gla_verify_trees),
                                        TEST(test_gla_verify_together),
                                        TEST(test_embed_gate),
                                        TEST(test_rope_qk),
                                        TEST(test_commit),
                                        TEST(test_sparse_group_1),
                                        TEST(test_sparse_group_2),
                                        TEST(test_sparse_group_3),
                                        TEST(test_sparse_group_8),
                                        TEST(test_sparse_group_16),
                                        TEST(test_sparse_long),
                                        TEST(test_sparse_top_k),
                                        SAMPLE_TESTS,
                                        DRAFT_TESTS};
    if (!device_exists()) {
        printf("skipped: no simulator (build/libsala_sim.so) and no SALA_TEST_GPU\n");
        printf("0 passed, 0 failed\n");
        return 0;
    }
    device_units = 1;
    int status = check_main(tests, (int)(sizeof tests / sizeof tests[0]), argc, argv);
    device_close();
    return status;
}
