/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_directory.h - for fuzz targets of one file in a checkpoint's directory: the directory, small safetensors files in
 * it, and a walk over everything that an opened checkpoint offers.
 */
#ifndef NIB_FUZZ_DIRECTORY_H
#define NIB_FUZZ_DIRECTORY_H

#include <dirent.h>
#include <fcntl.h>

#include "nib_checkpoint.h"
#include "nib_file.h"
#include "fuzz.h"
#ifdef NIB_TEST_WRAP_MEMORY
#include "memory_files.h"
#endif

/* ---- The directory ---- */

enum { FOLDERS = 8 };
static char directories[FOLDERS][64];
static int n_directories;

#ifdef NIB_TEST_WRAP_MEMORY
static inline const char *make_directory(void)
{
    char *path = directories[n_directories++];
    snprintf(path, sizeof directories[0], MEMORY_ROOT "/%d", n_directories);
    require(mkdir(path, 0777) == 0, "a directory");
    return path;
}
#else
static pid_t owner;

static inline void remove_directories(void)
{
    for (int i = 0; i < n_directories && owner == getpid(); i++) {
        DIR *listing = opendir(directories[i]);
        for (struct dirent *item; listing && (item = readdir(listing));)
            if (item->d_name[0] != '.')
                unlinkat(dirfd(listing), item->d_name, 0);
        if (listing)
            closedir(listing);
        rmdir(directories[i]);
    }
}

/* One more directory: where TMPDIR says, or else in memory where there is such a place. It goes with the process. */
static inline const char *make_directory(void)
{
    char *path = directories[n_directories++];
    const char *tmp = getenv("TMPDIR"), *memory = access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";
    snprintf(path, sizeof directories[0], "%.40s/nib-fuzz-XXXXXX", tmp && *tmp ? tmp : memory);
    require(mkdtemp(path) != NULL, "a directory");
    owner = getpid();
    if (n_directories == 1)
        atexit(remove_directories);
    return path;
}

#endif

static inline void put_file(const char *directory, const char *name, const void *bytes, size_t count)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    const int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0666);
    require(fd >= 0 && pwrite(fd, bytes, count, 0) == (ssize_t)count && !close(fd), "writing a file");
}

struct put_tensor {
    const char *name;
    nib_dtype dtype;
    int64_t rank;
    int64_t shape[4];
    uint8_t fill; /* every byte */
};

static inline void put_tensors(const char *directory, const char *name, const struct put_tensor *tensors, size_t n)
{
    char path[256];
    static uint8_t data[1 << 16];
    nib_writer *writer = NULL;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    require(!nib_writer_create(path, &writer), "a file of tensors");
    for (size_t i = 0; i < n; i++)
        require(!nib_writer_declare(writer, tensors[i].name, tensors[i].dtype, tensors[i].rank, tensors[i].shape),
                "a tensor");
    for (size_t i = 0; i < n; i++) {
        size_t bytes = (size_t)nib_dtype_bits(tensors[i].dtype) / 8;
        for (int64_t d = 0; d < tensors[i].rank; d++)
            bytes *= (size_t)tensors[i].shape[d];
        memset(data, tensors[i].fill, bytes);
        require(bytes <= sizeof data && !nib_writer_write(writer, tensors[i].name, 0, data, bytes), "its data");
    }
    require(!nib_writer_commit(writer), "the end of a file");
    nib_writer_destroy(writer);
}

/* ---- The walk ---- */

static inline int known(nib_status status)
{
    return status == NIB_OK || status == NIB_ERR_DATA || status == NIB_ERR_UNSUPPORTED || status == NIB_ERR_MODE ||
           status == NIB_ERR_SHAPE;
}

static inline void walk_weights(const nib_checkpoint *c, size_t weights)
{
    static float values[1 << 16];
    static uint8_t codes[1 << 15], scales[1 << 12];
    for (size_t i = 0; i < weights; i++) {
        nib_weight w = { .bytes = sizeof w };
        size_t found;
        const nib_status status = nib_checkpoint_get_weight(c, i, &w);
        require(known(status), "a weight");
        if (status)
            continue;
        require(w.name && w.tensor && w.file && w.rows >= 0 && w.cols >= 0, "facts of a weight");
        require(!nib_checkpoint_find_weight(c, w.name, &found) && found == i, "finding a weight");
        if (w.rows < 1 || w.cols < 1 || w.rows * w.cols > (int64_t)(sizeof values / sizeof *values))
            continue;
        nib_array out;
        require(!nib_array_init(&out, values, NIB_F32, 2, (const int64_t[2]){ w.rows, w.cols }), "an array");
        require(known(nib_checkpoint_read_rows(c, i, 0, w.rows, &out)), "rows");
        require(nib_checkpoint_read_rows(c, i, 1, w.rows, &out), "rows behind the end");
        require(known(nib_checkpoint_read_codes(c, i, 0, w.rows, codes, scales)), "codes");
        if (w.tensor_scale_kind == NIB_TENSOR_SCALE_NONE)
            continue;
        nib_weight_stats stats = { .bytes = sizeof stats };
        nib_job job;
        nib_job_init(&job);
        job.threads = 1;
        require(known(nib_checkpoint_measure(c, i, c, i, &job, &stats)), "measuring");
    }
}

static inline void walk_plan(nib_status status, nib_plan *plan)
{
    require(known(status) || status == NIB_ERR_ARG, "the status of a plan");
    require(!status == (plan != NULL), "a plan or none");
    if (!plan)
        return;
    nib_plan_facts facts = { .bytes = sizeof facts };
    require(!nib_plan_get_facts(plan, &facts), "facts of a plan");
    require(facts.changed + facts.kept == facts.weights, "the rows of a plan");
    for (size_t i = 0; i < facts.weights; i++) {
        nib_plan_row row = { .bytes = sizeof row };
        require(!nib_plan_get_row(plan, i, &row) && row.name && row.reason && row.group, "a row");
        require(row.action == NIB_ACTION_KEEP || row.action == NIB_ACTION_DEQUANTIZE || !*row.reason, "a reason");
    }
    nib_plan_destroy(plan);
}

static inline void walk_plans(const nib_checkpoint *c)
{
    static const nib_checkpoint_format formats[] = { NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS,
                                                     NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_CHECKPOINT_FORMAT_GGUF,
                                                     NIB_CHECKPOINT_FORMAT_TORCHAO };
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        nib_plan *plan = NULL;
        if (formats[i] != NIB_CHECKPOINT_FORMAT_TORCHAO) {
            nib_quantize_options options;
            nib_quantize_options_init(&options);
            options.format = formats[i];
            options.scheme = i % 2 ? NIB_SCHEME_NVFP4 : NIB_SCHEME_NVFP4A16;
            options.activation = i % 2 ? NIB_ACTIVATION_NORM : NIB_ACTIVATION_ONE;
            const nib_status status = nib_plan_quantize(c, &options, &plan);
            walk_plan(status, plan);
            plan = NULL;
        }
        const nib_status status = nib_plan_convert(c, formats[i], &plan);
        walk_plan(status, plan);
    }
    nib_plan *plan = NULL;
    nib_status status = nib_plan_dequantize(c, NIB_CHECKPOINT_FORMAT_PLAIN, NIB_BF16, &plan);
    walk_plan(status, plan);
    plan = NULL;
    status = nib_plan_repair(c, &plan);
    walk_plan(status, plan);
}

static inline int look_at_finding(void *context, const nib_finding *finding)
{
    (void)context;
    require(nib_severity_name(finding->severity) && *finding->id && *finding->tensor && *finding->fact &&
                *finding->consequence && *finding->remedy,
            "a finding");
    return 0;
}

static inline void walk_findings(const nib_checkpoint *c)
{
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    require(known(nib_checkpoint_check(c, NULL, &job, look_at_finding, NULL)), "a check");
}

/* Open a directory, whatever is in it, and use what came of it. */
static inline void try_directory(const char *path)
{
    nib_checkpoint *c = NULL;
    const nib_status status = nib_checkpoint_open(path, &c);
    require(known(status) || status == NIB_ERR_IO, "the status");
    require(!status == (c != NULL), "a checkpoint or none");
    require(!status || strlen(nib_last_error()) > 10, "the message");
    if (!c)
        return;
    nib_checkpoint_facts facts = { .bytes = sizeof facts };
    require(!nib_checkpoint_get_facts(c, &facts) && nib_checkpoint_format_name(facts.format), "facts");
    const char *before = "";
    for (size_t i = 0; i < facts.tensors; i++) {
        nib_checkpoint_tensor t = { .bytes = sizeof t };
        require(!nib_checkpoint_get_tensor(c, i, &t) && strcmp(before, t.name) < 0, "a tensor");
        before = t.name;
    }
    walk_weights(c, facts.weights);
    walk_plans(c);
    walk_findings(c);
    nib_checkpoint_close(c);
}

#endif
