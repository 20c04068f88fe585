/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_course.c - how a run goes: the same bytes for any threads, memory and ranks, in one pass over the input or two;
 * and what is left after everything that can go wrong.
 */
#define _GNU_SOURCE
/* NIB_TEST_WRAP_ALLOC */
#include "nib_checkpoint.h"
#include "team.h"
#include "test_alloc.h"
#include "test_run.h"

#include <errno.h>

/* ---- The same bytes ---- */

static int run_on_rank(const nib_comm *comm, void *context)
{
    nib_job job;
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    nib_job_init(&job);
    job.comm = comm;
    job.threads = 2;
    options.shard_bytes = 9000;
    return quantize(at("in"), context, &options, NULL, &job) != NIB_OK;
}

TEST(threads_memory_and_ranks_do_not_show)
{
    make_model(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    options.shard_bytes = 9000;
    CHECK_OK(quantize(at("in"), fresh("one"), &options, NULL, NULL));
    CHECK(entries(at("one")) > 6);
    static const int32_t threads[] = { 1, 2, 7 };
    static const uint64_t memory[] = { 1, 40000, 0 };
    for (int i = 0; i < 3; i++) {
        nib_job job;
        nib_job_init(&job);
        job.threads = threads[i];
        job.max_memory = memory[i];
        CHECK_OK(quantize(at("in"), fresh("two"), &options, NULL, &job));
        check_same_directory(at("one"), at("two"));
    }
    for (int ranks = 1; ranks <= 3; ranks++) {
        char out[200];
        snprintf(out, sizeof out, "%s", fresh("two"));
        CHECK(team_run(ranks, run_on_rank, out) == 0);
        check_same_directory(at("one"), at("two"));
    }
}

/* ---- One pass, or two ---- */

/* What says that it may have to be resumed goes through its input twice, as does what has several files. */
static const nib_run_options in_two = { .bytes = sizeof in_two, .resume = 1 };

static int stop_in_second_chunk(void *context, const nib_progress *progress)
{
    (void)context;
    return progress->done > 1 << 20;
}

/* Chunks of 1 MB, the last of which decides the scale: any number of threads has its amax and the same hash. One that
 * stops leaves none of the others waiting for its chunk. Strips of rows, 1 MB too, give the codes of the whole. */
TEST(threads_share_a_file)
{
    enum { ROWS = 280, COLS = 16384 }; /* strips of 32 rows, the last of 24 */
    uint16_t *values = malloc((size_t)ROWS * COLS * sizeof *values);
    for (size_t i = 0; i < (size_t)ROWS * COLS; i++)
        values[i] = (uint16_t)(0x3C00 + i % 251); /* 2^-7 and a little more */
    values[(size_t)ROWS * COLS - 1] = 0x4000;     /* 2 */
    CHECK_OK(nib_os_remove_directory(at("in")));
    CHECK(mkdir(at("in"), 0777) == 0);
    put_tensors(at("in/model.safetensors"),
                &(struct item){ LAYER "mlp.down_proj.weight", NIB_BF16, 2, { ROWS, COLS }, values }, 1);
    free(values);
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    CHECK_OK(quantize(at("in"), fresh("one"), NULL, NULL, &job));
    nib_checkpoint *one = open_good(at("one")), *in = open_good(at("in"));
    CHECK(fabsf(amax_of(one, LAYER "mlp.down_proj") - 2) < 0.2f);
    nib_quantizer q;
    default_quantizer(&q);
    check_quantized(in, one, LAYER "mlp.down_proj", &q, 2);
    nib_checkpoint_close(in);
    nib_checkpoint_close(one);
    for (int32_t i = 2; i <= 11; i++) {
        const nib_run_options *passes = i % 2 ? &in_two : NULL;
        job.threads = i / 2;
        job.progress = NULL;
        CHECK_OK(quantize(at("in"), fresh("two"), NULL, passes, &job));
        check_same_directory(at("one"), at("two"));
        job.progress = stop_in_second_chunk;
        CHECK_FAILS(quantize(at("in"), fresh("two"), NULL, passes, &job), NIB_ERR_CANCELLED, "stopped");
    }
    CHECK_OK(nib_os_remove_directory(at("in")));
}

/* Letters of what is done, in its order: r for a chunk that is read; c for the copy of a tensor, q for rows of a weight. */
struct steps {
    char kinds[200];
    uint64_t done;
};

static int note_kind(void *context, const nib_progress *progress)
{
    struct steps *steps = context;
    const size_t n = strlen(steps->kinds);
    const bool reads = !strcmp(progress->phase, "reading") || progress->done == steps->done;
    CHECK(n + 1 < sizeof steps->kinds);
    steps->kinds[n] = reads ? 'r' : strstr(progress->tensor, "embed") || strstr(progress->tensor, "norm") ? 'c' : 'q';
    steps->done = progress->done;
    return 0;
}

static const char *steps_of(const nib_run_options *passes, nib_status expected)
{
    static struct steps steps;
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    job.max_memory = 2 << 20;
    job.progress = note_kind;
    job.context = &steps;
    steps = (struct steps){ 0 };
    CHECK(quantize(at("in"), fresh("two"), NULL, passes, &job) == expected);
    return steps.kinds;
}

/* 4 MB that are copied, and 8 MB that are quantized. In one pass what a chunk brings is done before the next one is read;
 * in two, copies are spread among weights, so that threads do not all write. */
TEST(what_is_known_is_written)
{
    CHECK_OK(nib_os_remove_directory(at("in")));
    CHECK(mkdir(at("in"), 0777) == 0);
    PUT(at("in/model.safetensors"), { "model.embed_tokens.weight", NIB_BF16, 2, { 2048, 1024 }, 0 },
        { LAYER "mlp.down_proj.weight", NIB_BF16, 2, { 2048, 1024 }, 0.02f },
        { LAYER "mlp.gate_proj.weight", NIB_BF16, 2, { 1024, 1024 }, 0.02f },
        { LAYER "mlp.up_proj.weight", NIB_BF16, 2, { 1024, 1024 }, 0.02f });
    const char *steps = steps_of(NULL, NIB_OK);
    /* down_proj is known at its end; gate_proj and up_proj, which share a scale, at that of the second. */
    CHECK_THAT(!strcmp(steps, "rrcrcrcrcrrrrqqqqqrrrrqqqqqq"), "%s", steps);
    CHECK_OK(nib_os_remove_directory(at("one")));
    CHECK(rename(at("two"), at("one")) == 0);
    steps = steps_of(&in_two, NIB_OK);
    CHECK_THAT(!strcmp(steps, "rrrrrrrrrrrrrqcqqcqqqcqqqcqq"), "%s", steps);
    check_same_directory(at("one"), at("two"));
    /* After an infinity in down_proj nothing more is written, and all is looked at. */
    damage(at("in/model.safetensors"), 4 << 20 | 2, (uint8_t[]){ 0x80, 0x7F }, 2);
    damage(at("in/model.safetensors"), 2, (uint8_t[]){ 0x80, 0x7F }, 2);
    steps = steps_of(NULL, NIB_ERR_DATA);
    CHECK_THAT(!strcmp(steps, "rrcrcrcrcrrrrrrrr"), "%s", steps);
    CHECK_THAT(strstr(nib_last_error(), "down_proj\": element [2047, 1023]") &&
                   strstr(nib_last_error(), "; 1 more weights have some"),
               "%s", nib_last_error());
    CHECK_OK(nib_os_remove_directory(at("in")));
}

/* Stacks of 1 MB an expert, as rows, columns, and columns in turns. */
TEST(one_pass_gives_what_two_do)
{
    static const struct {
        const char *family;
        int64_t lines, length;
    } stacks[] = { { "qwen3_moe", 1024, 512 }, { "llama4", 512, 1024 }, { "gpt_oss", 512, 1024 } };
    for (int i = 0; i < 3; i++) {
        char text[256];
        CHECK_OK(nib_os_remove_directory(at("in")));
        CHECK(mkdir(at("in"), 0777) == 0);
        PUT(at("in/model.safetensors"),
            { LAYER "mlp.experts.gate_up_proj", NIB_BF16, 3, { 4, stacks[i].lines, stacks[i].length }, 0.02f });
        snprintf(text, sizeof text,
                 "{\"model_type\": \"%s\", \"hidden_size\": 512, \"num_experts\": 4, \"moe_intermediate_size\": 512, "
                 "\"intermediate_size\": 512}",
                 stacks[i].family);
        put_text(at("in/config.json"), text);
        CHECK_OK(quantize(at("in"), fresh("one"), NULL, NULL, NULL));
        CHECK_OK(quantize(at("in"), fresh("two"), NULL, &in_two, NULL));
        check_same_directory(at("one"), at("two"));
    }
    CHECK_OK(nib_os_remove_directory(at("in")));
}

/* ---- What goes wrong ---- */

TEST(the_place_of_the_output_is_checked)
{
    make_model(at("in"));
    const nib_run_options force = { .bytes = sizeof force, .force = 1 };
    CHECK_FAILS(quantize(at("in"), at("in"), NULL, &force, NULL), NIB_ERR_MODE, "in the place of");
    CHECK_FAILS(quantize(at("in"), at("in/out"), NULL, &force, NULL), NIB_ERR_MODE, "within the input");
    CHECK_FAILS(quantize(at("in"), directory, NULL, &force, NULL), NIB_ERR_MODE, "around the input");
    CHECK(symlink(at("in"), at("link")) == 0);
    CHECK_FAILS(quantize(at("in"), at("link/x"), NULL, &force, NULL), NIB_ERR_MODE, "within the input");
    unlink(at("link"));
    /* Files that are read and lie elsewhere: what a link names, and codes. */
    make_model(at("old"));
    CHECK(rename(at("in/model-00002-of-00002.safetensors"), at("kept")) == 0);
    CHECK(symlink(at("old/model-00002-of-00002.safetensors"), at("in/model-00002-of-00002.safetensors")) == 0);
    CHECK_FAILS(quantize(at("in"), at("old"), NULL, &force, NULL), NIB_ERR_MODE, "around ");
    CHECK(strstr(nib_last_error(), "/in/model-00002-of-00002.safetensors, which is read"));
    CHECK(rename(at("kept"), at("in/model-00002-of-00002.safetensors")) == 0);
    CHECK_OK(quantize(at("in"), fresh("out"), NULL, NULL, NULL));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    options.codes = at("out");
    CHECK_FAILS(quantize(at("in"), at("out"), &options, &force, NULL), NIB_ERR_MODE, "around ");
    CHECK_OK(quantize(at("in"), fresh("out"), NULL, NULL, NULL));
    CHECK_OK(nib_os_remove_directory(at("old")));
    CHECK_FAILS(quantize(at("in"), at("no/such/directory"), NULL, NULL, NULL), NIB_ERR_IO, "no such place");
    CHECK_FAILS(quantize(at("in"), "", NULL, NULL, NULL), NIB_ERR_ARG, "no name");
    CHECK_OK(nib_os_remove_directory(at("out")));
    put_text(at("out"), "a file");
    CHECK_FAILS(quantize(at("in"), at("out"), NULL, &force, NULL), NIB_ERR_MODE, "not a directory");
    unlink(at("out"));
    CHECK(mkdir(at("out"), 0777) == 0);
    put_text(at("out/mine.txt"), "mine");
    put_text(at("out/model-00007-of-00009.safetensors"), "stale");
    put_text(at("out/model.safetensors.index.json"), "stale");
    CHECK_FAILS(quantize(at("in"), at("out"), NULL, NULL, NULL), NIB_ERR_MODE, "--force");
    CHECK(entries(at("out")) == 3);
    CHECK_OK(quantize(at("in"), at("out"), NULL, &force, NULL));
    CHECK(!nib_os_exists(at("out/model-00007-of-00009.safetensors")));
    CHECK(!nib_os_exists(at("out/model.safetensors.index.json")));
    CHECK(same_file(at("out/mine.txt"), at("out/mine.txt")));
    const nib_quantize_options gguf = with(NIB_CHECKPOINT_FORMAT_GGUF);
    CHECK_FAILS(quantize(at("in"), at("x.gguf"), NULL, NULL, NULL), NIB_ERR_ARG, "choose the format gguf");
    make_llama(at("in"));
    CHECK_FAILS(quantize(at("in"), at("x"), &gguf, NULL, NULL), NIB_ERR_ARG, ".gguf");
    CHECK(mkdir(at("d.gguf"), 0777) == 0);
    CHECK_FAILS(quantize(at("in"), at("d.gguf"), &gguf, &force, NULL), NIB_ERR_MODE, "it is a directory");
    rmdir(at("d.gguf"));
}

TEST(numbers_that_are_none_are_named_with_their_place)
{
    CHECK_OK(nib_os_remove_directory(at("bad")));
    CHECK(mkdir(at("bad"), 0777) == 0);
    PUT(at("bad/model.safetensors"), { LAYER "self_attn.q_proj.weight", NIB_BF16, 2, { H, H }, 0.02f });
    damage(at("bad/model.safetensors"), 2 * (2 * H + 5), (uint8_t[]){ 0xC0, 0xFF }, 2); /* row 61, column 59: NaN */
    CHECK_FAILS(quantize(at("bad"), fresh("out"), NULL, NULL, NULL), NIB_ERR_DATA, "element [61, 59] is a NaN");
    CHECK(entries(at("out")) == 1); /* the directory of the run alone */
    PUT(at("bad/model.safetensors"), { LAYER "mlp.experts.gate_up_proj", NIB_F32, 3, { E, H, 2 * INNER }, 0.02f });
    put_text(at("bad/config.json"), "{\"model_type\": \"llama4\", \"hidden_size\": 64, \"intermediate_size\": 32}");
    /* The last element of the last expert: row 31 of "up", column 63. */
    damage(at("bad/model.safetensors"), 4, (uint8_t[]){ 0, 0, 0x80, 0x7F }, 4);
    CHECK_FAILS(quantize(at("bad"), fresh("out"), NULL, NULL, NULL), NIB_ERR_DATA,
                "experts.2.up_proj\": element [31, 63] is an infinity");
    CHECK(!strstr(nib_last_error(), "more weights"));
    damage(at("bad/model.safetensors"), 8, (uint8_t[]){ 0, 0, 0x80, 0x7F }, 4); /* another row of it */
    damage(at("bad/model.safetensors"), 4 * (2 * INNER * H + 1), (uint8_t[]){ 0, 0, 0x80, 0x7F },
           4); /* and expert 1's */
    CHECK_FAILS(quantize(at("bad"), fresh("out"), NULL, NULL, NULL), NIB_ERR_DATA, "; 1 more weights have some");
}

/* A callback that stops, or does something, at its n-th call. */
struct stopper {
    int calls, at;
    void (*then)(void);
    int answer;
};

static int count_call(void *context, const nib_progress *progress)
{
    struct stopper *s = context;
    CHECK(progress->done <= progress->total && progress->phase);
    if (s->calls++ != s->at)
        return 0;
    if (s->then)
        s->then();
    return s->answer;
}

static nib_job stop_at(struct stopper *s)
{
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    job.max_memory = 4096;
    job.progress = count_call;
    job.context = s;
    return job;
}

TEST(cancelling_leaves_nothing_or_what_resume_needs)
{
    make_model(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    options.shard_bytes = 9000;
    CHECK_OK(quantize(at("in"), fresh("whole"), &options, NULL, NULL));
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 };
    struct stopper never = { .at = -1 };
    nib_job job = stop_at(&never);
    CHECK_OK(quantize(at("in"), fresh("out"), &options, NULL, &job));
    CHECK(never.calls > 10);
    for (int i = 0; i < never.calls; i++) {
        struct stopper s = { .at = i, .answer = 1 };
        job = stop_at(&s);
        const char *out = fresh("out");
        CHECK_FAILS(quantize(at("in"), out, &options, NULL, &job), NIB_ERR_CANCELLED, "stopped");
        CHECK_THAT(!nib_os_exists(at("out")), "%d: the directory is still there", i);
        s.calls = 0;
        CHECK_FAILS(quantize(at("in"), out, &options, &resume, &job), NIB_ERR_CANCELLED, "stopped");
        CHECK(entries(at("out")) == 1);
        CHECK_FAILS(quantize(at("in"), out, &options, NULL, NULL), NIB_ERR_MODE, "--resume");
        s = (struct stopper){ .at = -1 };
        job = stop_at(&s);
        CHECK_OK(quantize(at("in"), out, &options, &resume, &job));
        CHECK_THAT(s.calls <= never.calls, "%d: everything was done again", i);
        check_same_directory(at("whole"), at("out"));
    }
}

TEST(resuming_is_for_the_same_plan_and_input)
{
    make_model(at("in"));
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 },
                          force = { .bytes = sizeof force, .force = 1 };
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    CHECK_OK(quantize(at("in"), fresh("whole"), &options, NULL, NULL));
    struct stopper s = { .at = 8, .answer = 1 };
    nib_job job = stop_at(&s);
    const char *out = fresh("out");
    CHECK_FAILS(quantize(at("in"), out, &options, &resume, &job), NIB_ERR_CANCELLED, "stopped");
    options.scale_rule = NIB_SCALE_RTN;
    CHECK_FAILS(quantize(at("in"), out, &options, &resume, NULL), NIB_ERR_MODE, "other options");
    options.scale_rule = NIB_UNSET;
    damage(at("in/model-00002-of-00002.safetensors"), 1, "\x01", 1);
    CHECK_FAILS(quantize(at("in"), out, &options, &resume, NULL), NIB_ERR_MODE, "it has changed since");
    CHECK_OK(quantize(at("in"), out, &options, &force, NULL));
    /* One that is complete needs nothing more; one that is not this plan's is in the way. */
    CHECK_OK(quantize(at("in"), out, &options, &resume, NULL));
    options.scale_rule = NIB_SCALE_RTN;
    CHECK_FAILS(quantize(at("in"), out, &options, &resume, NULL), NIB_ERR_MODE, "--force");
    /* With nothing to go on from, resume starts. */
    CHECK_OK(quantize(at("in"), fresh("out"), &options, &resume, NULL));
}

/* Files of the model may be called like temporary ones; a run that was stopped among the final names has none of those. */
TEST(resuming_keeps_what_only_looks_temporary)
{
    make_model(at("in"));
    put_text(at("in/notes.tmp-1.txt"), "notes");
    put_text(at("in/notes.tmp-1-0"), "more notes");
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 },
                          force = { .bytes = sizeof force, .force = 1 };
    CHECK_OK(quantize(at("in"), fresh("whole"), NULL, NULL, NULL));
    const char *out = fresh("out");
    CHECK(mkdir(out, 0777) == 0 && mkdir(at("out/config.json"), 0777) == 0); /* in the way of the last name */
    CHECK_FAILS(quantize(at("in"), out, NULL, &force, NULL), NIB_ERR_IO, "config.json: cannot remove");
    CHECK(nib_os_exists(at("out/.nib-partial/complete")));
    CHECK(rmdir(at("out/config.json")) == 0);
    CHECK_OK(quantize(at("in"), out, NULL, &resume, NULL));
    check_same_directory(at("whole"), at("out"));
}

/* What stands beside the weights and cannot be copied ends a run before any weight is written. */
TEST(files_beside_the_weights_come_first)
{
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 };
    make_model(at("in"));
    CHECK(mkfifo(at("in/pipe.txt"), 0666) == 0);
    CHECK_FAILS(quantize(at("in"), fresh("out"), NULL, &resume, NULL), NIB_ERR_IO, "pipe.txt: not a regular file");
    CHECK(!nib_os_exists(at("out/.nib-partial/scan-00000.json")));
    CHECK(unlink(at("in/pipe.txt")) == 0 && symlink("nowhere", at("in/link.txt")) == 0);
    CHECK_FAILS(quantize(at("in"), at("out"), NULL, &resume, NULL), NIB_ERR_IO, "link.txt: cannot open");
    CHECK(!nib_os_exists(at("out/.nib-partial/scan-00000.json")));
    CHECK(unlink(at("in/link.txt")) == 0);
    put_text(at("in/notes.txt"), "notes");
    CHECK_OK(quantize(at("in"), at("out"), NULL, &resume, NULL));
    CHECK(nib_os_exists(at("out/notes.txt")));
}

static int note_warning(void *context, const nib_progress *progress)
{
    char *text = context;
    if (progress->warning)
        snprintf(text + strlen(text), 512 - strlen(text), "%s\n", progress->warning);
    return 0;
}

/* What stays behind is said, but for weights in another form and what is hidden. */
TEST(directories_beside_the_weights_are_named)
{
    char warnings[512] = "";
    const nib_job job = { .bytes = sizeof job, .progress = note_warning, .context = warnings };
    make_model(at("in"));
    CHECK(mkdir(at("in/1_Pooling"), 0777) == 0 && mkdir(at("in/onnx"), 0777) == 0 && mkdir(at("in/.git"), 0777) == 0);
    put_text(at("in/1_Pooling/pooling.json"), "{}");
    put_text(at("in/onnx/model.onnx"), "weights");
    put_text(at("in/.git/description"), "hidden");
    CHECK_OK(quantize(at("in"), fresh("out"), NULL, NULL, &job));
    CHECK_THAT(strstr(warnings, "/in: directories stay behind: copy \"1_Pooling\" if what loads the model reads it\n"),
               "%s", warnings);
    CHECK_THAT(!strstr(warnings, "onnx") && !strstr(warnings, "git"), "%s", warnings);
    CHECK(!nib_os_exists(at("out/1_Pooling")));
}

/* A temporary name is longer than the name; a character may lie where it is cut. */
TEST(names_may_be_as_long_as_the_system_takes)
{
    enum { LONGEST = 255 };
    char name[LONGEST + 1], in[PATH_MAX], out[PATH_MAX];
    make_model(at("in"));
    fresh("out");
    for (int wide = 0; wide < 4; wide++) {
        memset(name, 'n', LONGEST);
        name[LONGEST] = '\0';
        if (wide)
            memcpy(name + 64 - wide, "\U0001F600", 4);
        snprintf(in, sizeof in, "%s/%s", at("in"), name);
        put_text(in, "notes");
    }
    CHECK_OK(quantize(at("in"), at("out"), NULL, NULL, NULL));
    CHECK(!nib_os_exists(at("out/.nib-partial")));
    for (int wide = 0; wide < 4; wide++) {
        memset(name, 'n', LONGEST);
        if (wide)
            memcpy(name + 64 - wide, "\U0001F600", 4);
        snprintf(out, sizeof out, "%s/%s", at("out"), name);
        CHECK(nib_os_exists(out));
        /* Some systems take no part of a character. */
        char *temporary = NULL, wanted[LONGEST];
        int fd = -1;
        snprintf(wanted, sizeof wanted, "%.*s.tmp-", 64 - wide, name);
        CHECK_OK(nib_os_create_temporary(out, &fd, &temporary));
        CHECK_THAT(temporary && strncmp(strrchr(temporary, '/') + 1, wanted, strlen(wanted)) == 0, "%s", temporary);
        nib_os_close(fd);
        remove(temporary);
        nib_free(temporary);
    }
}

static void run_another(void)
{
    const nib_run_options force = { .bytes = sizeof force, .force = 1 };
    CHECK_FAILS(quantize(at("in"), at("out"), NULL, &force, NULL), NIB_ERR_MODE, "another run is writing here");
}

/* What a stopped run noted of a file, with its first maximum changed to something else. */
static void change_note(const char *path, const char *to)
{
    size_t count;
    char *text = get_file(path, &count), *list = text ? strstr(text, "\"largest\":[") : NULL;
    CHECK(list != NULL);
    if (list) {
        char *changed = malloc(count + 64);
        const char *rest = list + strlen("\"largest\":[");
        snprintf(changed, count + 64, "%.*s%s%s", (int)(rest - text), text, to, rest + strcspn(rest, ",]"));
        put_text(path, changed);
        free(changed);
    }
    free(text);
}

TEST(notes_that_cannot_be_are_not_believed)
{
    static const char *const values[] = { "\"1\"", "1.5", "-1", "2147483648", "null" };
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 };
    make_model(at("in"));
    CHECK_OK(quantize(at("in"), fresh("whole"), NULL, NULL, NULL));
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        struct stopper s = { .at = 12, .answer = 1 };
        nib_job job = stop_at(&s);
        CHECK_FAILS(quantize(at("in"), fresh("out"), NULL, &resume, &job), NIB_ERR_CANCELLED, "stopped");
        change_note(at("out/.nib-partial/scan-00000.json"), values[i]);
        CHECK_OK(quantize(at("in"), at("out"), NULL, &resume, NULL));
        check_same_directory(at("whole"), at("out"));
    }
}

static void change_input(void) { damage(at("in/model-00001-of-00002.safetensors"), 1, "\x02", 1); }

static void shorten_input(void) { CHECK(truncate(at("in/model-00002-of-00002.safetensors"), 3000) == 0); }

TEST(others_at_work_are_noticed)
{
    make_model(at("in"));
    struct stopper s = { .at = 2, .then = run_another };
    nib_job job = stop_at(&s);
    CHECK_OK(quantize(at("in"), fresh("out"), NULL, NULL, &job));
    s = (struct stopper){ .at = 12, .then = change_input };
    CHECK_FAILS(quantize(at("in"), fresh("out"), NULL, NULL, &job), NIB_ERR_IO, "it was changed while");
    CHECK(entries(at("out")) == 1);
    make_model(at("in"));
    s = (struct stopper){ .at = 3, .then = shorten_input };
    CHECK_FAILS(quantize(at("in"), fresh("out"), NULL, NULL, &job), NIB_ERR_IO, "longer when opened");
    CHECK(entries(at("out")) == 1);
}

/* Descriptor 0 is one as any other, where nothing is on standard input. */
TEST(standard_input_may_be_closed)
{
    make_model(at("in"));
    nib_checkpoint *in = open_good(at("in"));
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_quantize(in, NULL, &plan));
    const int before = dup(0);
    close(0);
    CHECK_OK(nib_plan_run(plan, fresh("out"), NULL, NULL)); /* what it opens first gets 0 */
    CHECK(close(0) == -1);                                  /* nobody has it any more */
    CHECK_OK(quantize(at("in"), fresh("out"), NULL, NULL, NULL));
    CHECK(close(0) == -1);
    CHECK(before < 0 || dup2(before, 0) == 0);
    close(before);
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

TEST(a_folder_that_cannot_be_written_is_an_error)
{
    CHECK_FAILS(nib_os_sync_parent(at("nothing/here")), NIB_ERR_IO, "cannot open");
    make_model(at("in"));
    const char *out = fresh("locked");
    CHECK(mkdir(out, 0555) == 0);
    if (geteuid() == 0)
        SKIP("root may write anywhere");
    CHECK_FAILS(quantize(at("in"), out, NULL, NULL, NULL), NIB_ERR_IO, "cannot");
    CHECK(entries(out) == 0);
}

TEST(a_file_becomes_a_file)
{
    make_model(at("in"));
    const char *in = at("in/model-00001-of-00002.safetensors");
    CHECK_OK(quantize(in, at("one.safetensors"), NULL, NULL, NULL));
    CHECK(!nib_os_exists(at("one.safetensors.nib-partial")));
    nib_checkpoint *c = open_good(at("one.safetensors"));
    CHECK(c && c->format == NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS && c->n_files == 1);
    nib_checkpoint_close(c);
    CHECK_FAILS(quantize(in, at("one.safetensors"), NULL, NULL, NULL), NIB_ERR_MODE, "--force");
    const nib_run_options force = { .bytes = sizeof force, .force = 1 };
    CHECK(mkfifo(at("pipe.safetensors"), 0666) == 0); /* somebody may be reading it */
    CHECK_FAILS(quantize(in, at("pipe.safetensors"), NULL, &force, NULL), NIB_ERR_MODE, "not a regular file");
    CHECK(nib_os_is_special(at("pipe.safetensors")) && !nib_os_exists(at("pipe.safetensors.nib-partial")));
    CHECK_FAILS(quantize(in, in, NULL, NULL, NULL), NIB_ERR_MODE, "in the place of");
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 };
    CHECK_OK(quantize(in, at("one.safetensors"), NULL, &resume, NULL)); /* it is complete */
    unlink(at("one.safetensors"));
}

/* A plan is the same, or there is none. */
TEST(no_allocation_that_fails_leaves_half_a_plan)
{
    make_stacks(at("in"), "gpt_oss");
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    options.shard_bytes = 3000;
    nib_checkpoint *in = open_good(at("in"));
    nib_plan *whole = plan_quantize(in, &options);
    for (long left = 0, failed = 1; failed; left++) {
        nib_plan *plan = NULL;
        allocations_left = left;
        const nib_status status = nib_plan_quantize(in, &options, &plan);
        failed = allocations_left < 0;
        allocations_left = -1;
        CHECK_THAT(status ? status == NIB_ERR_MEMORY && !plan
                          : plan->n_files == whole->n_files && plan->n_tensors == whole->n_tensors &&
                                plan->n_weights == whole->n_weights,
                   "allocation %ld: %s: %s", left, nib_status_name(status), nib_last_error());
        for (size_t i = 0; plan && i < plan->n_files && i < whole->n_files; i++)
            CHECK(plan->files[i].first == whole->files[i].first && plan->files[i].tensors == whole->files[i].tensors);
        CHECK(failed || left > 20);
        nib_plan_destroy(plan);
    }
    nib_plan_destroy(whole);
    nib_checkpoint_close(in);
}

TEST(patterns_are_text)
{
    static const char *const pattern[] = { "a*", "\xC3*" };
    make_model(at("in"));
    nib_checkpoint *in = open_good(at("in"));
    for (int list = 0; list < 4; list++) {
        nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
        const char *const **const lists[] = { &options.ignore, &options.only, &options.fp8, &options.plain };
        size_t *const counts[] = { &options.n_ignore, &options.n_only, &options.n_fp8, &options.n_plain };
        nib_plan *plan = NULL;
        *lists[list] = pattern;
        *counts[list] = 2;
        CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "\"?*\" is not UTF-8");
    }
    nib_checkpoint_close(in);
}

static long json_left = -1; /* as allocations_left, of the JSON library */

static void *allocate_json(size_t bytes) { return json_left >= 0 && json_left-- == 0 ? NULL : malloc(bytes); }

/* The same configuration, or no plan. */
TEST(no_json_that_fails_leaves_half_a_configuration)
{
    make_model(at("in"));
    const nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    nib_checkpoint *in = open_good(at("in"));
    nib_plan *whole = plan_quantize(in, &options);
    json_set_alloc_funcs(allocate_json, free);
    for (long left = 0, failed = 1; failed; left++) {
        nib_plan *plan = NULL;
        json_left = left;
        const nib_status status = nib_plan_quantize(in, &options, &plan);
        failed = json_left < 0;
        json_left = -1;
        CHECK_THAT(status ? status == NIB_ERR_MEMORY && strstr(nib_last_error(), "no memory") && !plan
                          : json_equal(plan->config, whole->config) && json_equal(plan->hf_quant, whole->hf_quant),
                   "allocation %ld: %s: %s", left, nib_status_name(status), nib_last_error());
        CHECK(failed || left > 100);
        nib_plan_destroy(plan);
    }
    json_set_alloc_funcs(malloc, free);
    nib_plan_destroy(whole);
    nib_checkpoint_close(in);
}

/* The same keys, or no output. */
TEST(no_json_that_fails_is_left_out_of_an_output)
{
    make_model(at("in"));
    const nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    nib_checkpoint *in = open_good(at("in"));
    nib_plan *plan = plan_quantize(in, &options);
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    for (long left = 0, failed = 1; failed; left++) {
        CHECK_OK(nib_os_remove_directory(at("out")));
        json_set_alloc_funcs(allocate_json, free);
        json_left = left;
        const nib_status status = nib_plan_run(plan, at("out"), NULL, &job);
        failed = json_left < 0;
        json_left = -1;
        json_set_alloc_funcs(malloc, free);
        CHECK_THAT(!status || !nib_os_exists(at("out/config.json")), "allocation %ld: %s", left, nib_last_error());
        nib_checkpoint *out = status ? NULL : open_good(at("out"));
        if (out) /* and what it was made by */
            CHECK_THAT(json_object_size(out->config) == json_object_size(plan->config) + 1 &&
                           json_object_size(out->hf_quant_config) == json_object_size(plan->hf_quant) &&
                           json_equal(out->quantization, json_object_get(plan->config, "quantization_config")),
                       "allocation %ld: %zu keys", left, json_object_size(out->config));
        nib_checkpoint_close(out);
    }
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

static void fail_each_allocation(const char *in, uint64_t shard_bytes)
{
    make_model(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    options.shard_bytes = shard_bytes;
    options.scheme = NIB_SCHEME_NVFP4;
    nib_job job;
    nib_job_init(&job);
    job.threads = 1; /* the failing allocator is of this thread */
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 };
    CHECK_OK(quantize(at(in), fresh("whole"), &options, NULL, &job));
    long tried = 0;
    for (long left = 0;; left += 1 + left / 30) {
        CHECK_OK(nib_os_remove_directory(at("out")));
        allocations_left = left;
        const nib_status status = quantize(at(in), at("out"), &options, NULL, &job);
        const bool failed = allocations_left < 0;
        allocations_left = -1;
        if (!failed) {
            CHECK_OK(status);
            break;
        }
        tried++;
        CHECK_THAT(status == NIB_OK || status == NIB_ERR_MEMORY, "allocation %ld: %s: %s", left,
                   nib_status_name(status), nib_last_error());
        /* Nothing has its name before all is complete; what fails after the end finds all of it there, see below. */
        if (status && nib_os_exists(at("out/.nib-partial")) && !nib_os_exists(at("out/.nib-partial/complete")))
            CHECK(entries(at("out")) <= 1);
        if (status && nib_os_exists(at("out")))
            CHECK_OK(quantize(at(in), at("out"), &options, &resume, &job));
        if (nib_os_exists(at("out")))
            check_same_directory(at("whole"), at("out"));
    }
    CHECK_THAT(tried > 60, "%ld", tried);
    check_same_directory(at("whole"), at("out"));
}

/* Two files in two passes, and one in one. */
TEST(no_allocation_that_fails_does_harm)
{
    fail_each_allocation("in", 9000);
    fail_each_allocation("in/model-00002-of-00002.safetensors", 0);
}

TEST(arguments_are_checked)
{
    make_model(at("in"));
    nib_checkpoint *in = open_good(at("in"));
    nib_plan *plan = plan_quantize(in, NULL), *none = NULL;
    nib_job job;
    nib_run_options options = { .bytes = 1 };
    CHECK_FAILS(nib_plan_run(NULL, "x", NULL, NULL), NIB_ERR_ARG, "plan is NULL");
    CHECK_FAILS(nib_plan_run(plan, NULL, NULL, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_plan_run(plan, "x", &options, NULL), NIB_ERR_ARG, "nib_run_options");
    nib_job_init(&job);
    job.threads = -1;
    CHECK_FAILS(nib_plan_run(plan, "x", NULL, &job), NIB_ERR_ARG, "-1 threads");
    CHECK_FAILS(nib_plan_quantize(NULL, NULL, &none), NIB_ERR_ARG, "in is NULL");
    CHECK_FAILS(nib_plan_quantize(in, NULL, NULL), NIB_ERR_ARG, "out is NULL");
    nib_plan_destroy(plan);
    nib_plan_destroy(NULL);
    nib_job_init(NULL);
    nib_quantize_options_init(NULL);
    nib_checkpoint_close(in);
}

TEST_MAIN
