/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blas.c - cuBLASLt by its documented interface: twelve functions of a library that is opened at run time, and the
 * constants that they take. Its headers are 500 MB away.
 */
#include "blas.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- The library ---- */

enum { DONE = 0, NOT_SUPPORTED = 15 };                      /* cublasStatus_t */
enum { R_32F = 0, R_16F = 2, R_16BF = 14, R_4F_E2M1 = 33 }; /* cudaDataType_t */
enum { COMPUTE_32F = 68 };                                  /* cublasComputeType_t */
enum { EPILOGUE_BIAS = 4 };                                 /* cublasLtEpilogue_t */
enum { POINTERS_ON_DEVICE = 1 };                            /* cublasLtPointerMode_t */
enum { SCALES_OF_16 = 1 };                                  /* CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 */
enum { REDUCTION_IN_COMPUTE_TYPE = 2 };                     /* parts are never added up in y's dtype */
enum {                                                      /* cublasLtMatmulDescAttributes_t */
       DESC_POINTER_MODE = 2,
       DESC_TRANSPOSE_A = 3,
       DESC_EPILOGUE = 7,
       DESC_BIAS = 8,
       DESC_SCALES_A = 17,
       DESC_SCALES_B = 18,
       DESC_SCALE_MODE_A = 31,
       DESC_SCALE_MODE_B = 32
};
enum { PREFER_WORKSPACE = 1, PREFER_REDUCTION = 3, PREFER_ALIGNMENT_A = 5 }; /* then of B, C and D */

struct algorithm {
    uint64_t data[8];
};
struct heuristic {
    struct algorithm algorithm;
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};

typedef struct handle *handle;
typedef struct descriptor *descriptor; /* of a product, of a matrix, of preferences */

static struct {
    int (*create)(handle *out);
    const char *(*status_name)(int status);
    int (*desc_create)(descriptor *out, int compute_type, int scale_type);
    int (*desc_destroy)(descriptor d);
    int (*desc_set)(descriptor d, int attribute, const void *value, size_t bytes);
    int (*layout_create)(descriptor *out, int type, uint64_t rows, uint64_t columns, int64_t leading);
    int (*layout_destroy)(descriptor d);
    int (*preference_create)(descriptor *out);
    int (*preference_destroy)(descriptor d);
    int (*preference_set)(descriptor d, int attribute, const void *value, size_t bytes);
    int (*heuristic)(handle h, descriptor product, descriptor a, descriptor b, descriptor c, descriptor d,
                     descriptor preference, int wanted, struct heuristic *out, int *found);
    int (*multiply)(handle h, descriptor product, const void *alpha, const void *a, descriptor a_layout, const void *b,
                    descriptor b_layout, const void *beta, const void *c, descriptor c_layout, void *d,
                    descriptor d_layout, const struct algorithm *algorithm, void *workspace, size_t bytes,
                    cudaStream_t stream);
} lt;

static const char *const names[] = { "cublasLtCreate",
                                     "cublasLtGetStatusName",
                                     "cublasLtMatmulDescCreate",
                                     "cublasLtMatmulDescDestroy",
                                     "cublasLtMatmulDescSetAttribute",
                                     "cublasLtMatrixLayoutCreate",
                                     "cublasLtMatrixLayoutDestroy",
                                     "cublasLtMatmulPreferenceCreate",
                                     "cublasLtMatmulPreferenceDestroy",
                                     "cublasLtMatmulPreferenceSetAttribute",
                                     "cublasLtMatmulAlgoGetHeuristic",
                                     "cublasLtMatmul" };
_Static_assert(sizeof lt == sizeof names, "a function for each name");

static char why_not[256]; /* empty: it is there */

/* A framework that has loaded it has the one that fits the driver: a name alone finds that. */
static void *open_library(void)
{
    const char *const given = getenv("NIB_CUBLASLT_LIBRARY");
    if (given)
        return dlopen(*given ? given : NULL, RTLD_NOW | RTLD_LOCAL); /* empty: the program has it */
    void *const library = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    return library ? library : dlopen("libcublasLt.so.12", RTLD_NOW | RTLD_LOCAL);
}

static void load(void)
{
    void *const library = open_library();
    if (!library) {
        const char *const error = dlerror();
        snprintf(why_not, sizeof why_not, "%s", error ? error : "it cannot be loaded");
        return;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *const function = dlsym(library, names[i]);
        if (!function) {
            snprintf(why_not, sizeof why_not, "it has no %s", names[i]);
            return;
        }
        memcpy((char *)&lt + i * sizeof function, &function, sizeof function);
    }
}

static nib_status status_of(const struct nib_cuda_device *d, int status)
{
    if (status == DONE)
        return NIB_OK;
    return nib_fail(NIB_ERR_DEVICE, "%s: cuBLASLt: %s", d->base.name, lt.status_name(status));
}

enum { GPUS = 64 };

bool nib_cuda_blas_serves(const struct nib_cuda_device *d)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    return !*why_not && d->queue.ordinal < GPUS;
}

/* A GPU has one handle, for all streams, which stays: a new one would allocate, and a stream that is captured must not. */
static nib_status open_handle(struct nib_cuda_device *d, handle *out)
{
    static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
    static handle handles[GPUS];
    const int ordinal = d->queue.ordinal;
    const bool serves = nib_cuda_blas_serves(d);
    if (*why_not)
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s needs cuBLASLt (libcublasLt.so.13 or .12) for this product: %s",
                        d->base.name, why_not);
    if (!serves)
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s: cuBLASLt is used on the first %d GPUs", d->base.name, (int)GPUS);
    pthread_mutex_lock(&opening);
    const int status = handles[ordinal] ? DONE : lt.create(&handles[ordinal]);
    *out = handles[ordinal];
    pthread_mutex_unlock(&opening);
    return status_of(d, status);
}

/* ---- A product ---- */

/* What describes one; A is the major side, transposed, B the minor, and C and D are y. */
struct description {
    descriptor product, preference, a, b, y;
};

static int type_of(nib_dtype dtype) { return dtype == NIB_F32 ? R_32F : dtype == NIB_F16 ? R_16F : R_16BF; }

static int describe_product(const struct nib_cuda_blas_product *p, descriptor d)
{
    const int32_t mode = POINTERS_ON_DEVICE, transposed = 1, epilogue = EPILOGUE_BIAS, scales = SCALES_OF_16;
    int status = lt.desc_set(d, DESC_POINTER_MODE, &mode, sizeof mode);
    if (!status)
        status = lt.desc_set(d, DESC_TRANSPOSE_A, &transposed, sizeof transposed);
    if (!status && p->bias)
        status = lt.desc_set(d, DESC_EPILOGUE, &epilogue, sizeof epilogue);
    if (!status && p->bias)
        status = lt.desc_set(d, DESC_BIAS, &p->bias, sizeof p->bias);
    if (status || !p->major.scales)
        return status;
    status = lt.desc_set(d, DESC_SCALE_MODE_A, &scales, sizeof scales);
    if (!status)
        status = lt.desc_set(d, DESC_SCALE_MODE_B, &scales, sizeof scales);
    if (!status)
        status = lt.desc_set(d, DESC_SCALES_A, &p->major.scales, sizeof p->major.scales);
    if (!status)
        status = lt.desc_set(d, DESC_SCALES_B, &p->minor.scales, sizeof p->minor.scales);
    return status;
}

/* The largest power of two, up to 16, that every line begins at a multiple of. */
static uint32_t alignment_of(const void *data, int64_t stride_bytes)
{
    const uintptr_t bits = (uintptr_t)data | (uintptr_t)stride_bytes | 16;
    return (uint32_t)(bits & -bits);
}

static int describe_preference(const struct nib_cuda_blas_product *p, descriptor d)
{
    const int64_t bits = p->major.scales ? 4 : nib_dtypes[p->dtype].bits, y_bytes = nib_dtypes[p->y_dtype].bits / 8;
    const uint64_t workspace = NIB_CUDA_BLAS_BYTES;
    const uint32_t reduction = REDUCTION_IN_COMPUTE_TYPE,
                   alignment[] = { alignment_of(p->major.data, p->major.stride * bits / 8),
                                   alignment_of(p->minor.data, p->minor.stride * bits / 8),
                                   alignment_of(p->y, p->stride * y_bytes), alignment_of(p->y, p->stride * y_bytes) };
    int status = lt.preference_set(d, PREFER_WORKSPACE, &workspace, sizeof workspace);
    if (!status)
        status = lt.preference_set(d, PREFER_REDUCTION, &reduction, sizeof reduction);
    for (int i = 0; i < 4 && !status; i++)
        status = lt.preference_set(d, PREFER_ALIGNMENT_A + i, &alignment[i], sizeof alignment[i]);
    return status;
}

static int describe(const struct nib_cuda_blas_product *p, struct description *out)
{
    const int type = p->major.scales ? R_4F_E2M1 : type_of(p->dtype);
    const uint64_t length = (uint64_t)p->length, major = (uint64_t)p->major.lines, minor = (uint64_t)p->minor.lines;
    int status = lt.desc_create(&out->product, COMPUTE_32F, R_32F);
    if (!status)
        status = describe_product(p, out->product);
    if (!status)
        status = lt.preference_create(&out->preference);
    if (!status)
        status = describe_preference(p, out->preference);
    if (!status)
        status = lt.layout_create(&out->a, type, length, major, p->major.stride);
    if (!status)
        status = lt.layout_create(&out->b, type, length, minor, p->minor.stride);
    if (!status)
        status = lt.layout_create(&out->y, type_of(p->y_dtype), major, minor, p->stride);
    return status;
}

static void forget(const struct description *all)
{
    if (all->y)
        (void)lt.layout_destroy(all->y);
    if (all->b)
        (void)lt.layout_destroy(all->b);
    if (all->a)
        (void)lt.layout_destroy(all->a);
    if (all->preference)
        (void)lt.preference_destroy(all->preference);
    if (all->product)
        (void)lt.desc_destroy(all->product);
}

nib_status nib_cuda_blas_multiply(struct nib_cuda_device *d, const struct nib_cuda_blas_product *p, bool *done)
{
    struct description all = { 0 };
    struct heuristic found = { 0 };
    handle h = NULL;
    int count = 0;
    TRY(open_handle(d, &h));
    int status = describe(p, &all);
    if (!status)
        status = lt.heuristic(h, all.product, all.a, all.b, all.y, all.y, all.preference, 1, &found, &count);
    const bool none = status == NOT_SUPPORTED || (!status && (count == 0 || found.status));
    if (!status && !none)
        status = lt.multiply(h, all.product, p->alpha, p->major.data, all.a, p->minor.data, all.b, p->beta, p->y, all.y,
                             p->y, all.y, &found.algorithm, p->workspace, NIB_CUDA_BLAS_BYTES, d->queue.stream);
    forget(&all);
    *done = !status && !none;
    return none ? NIB_OK : status_of(d, status);
}
