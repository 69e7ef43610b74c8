// The one argument struct of all kernels of selftest.cu, for them and for tests/test_sim.c.
typedef struct selftest_args {
    const void *in;
    void *out;
    int *counter;
    int mode;  // which variant, right or wrong
    int count; // of whatever there is
} selftest_args;
