/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_machine.c - what machine nib bench runs on: its name, its processors and the memory that is left.
 */
#define _GNU_SOURCE /* sched_setaffinity */

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"

void bench_machine_name(char *name, size_t bytes)
{
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    snprintf(name, bytes, "unknown");
    while (file && fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon)
            continue;
        snprintf(name, bytes, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
        break;
    }
    if (file)
        fclose(file);
}

/* ---- Processors ---- */

/* Those that the process was given, before it bound itself to one of them. */
static const cpu_set_t *allowed(void)
{
    static cpu_set_t set;
    static int known; /* 0: not asked yet, -1: it cannot be known */
    if (!known)
        known = sched_getaffinity(0, sizeof set, &set) == 0 ? 1 : -1;
    return known > 0 ? &set : NULL;
}

int bench_processors(void)
{
    const cpu_set_t *const set = allowed();
    return set ? CPU_COUNT(set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
}

/* The second one: the first has more interrupts to serve. */
void bench_bind(int threads)
{
    const cpu_set_t *const set = allowed();
    cpu_set_t one;
    int seen = 0;
    if (!set)
        return;
    CPU_ZERO(&one);
    for (size_t cpu = 0; cpu < CPU_SETSIZE && seen < 2; cpu++)
        if (CPU_ISSET(cpu, set)) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            seen++;
        }
    (void)sched_setaffinity(0, sizeof one, threads == 1 ? &one : set); /* where it is forbidden, figures move more */
}

/* ---- Memory ---- */

/* The number after a word at the beginning of a line; -1: it is not there. */
static int64_t number_in(const char *path, const char *word)
{
    char line[256];
    int64_t number = -1;
    FILE *file = fopen(path, "r");
    while (file && number < 0 && fgets(line, sizeof line, file)) {
        char *end;
        const char *const digits = line + strlen(word);
        if (strncmp(line, word, strlen(word)) != 0)
            continue;
        number = strtoll(digits, &end, 10);
        number = end == digits ? -1 : number; /* "max" */
    }
    if (file)
        fclose(file);
    return number;
}

int64_t bench_free_memory(void)
{
    const int64_t machine = number_in("/proc/meminfo", "MemAvailable:");
    const int64_t most = number_in("/sys/fs/cgroup/memory.max", ""),
                  used = number_in("/sys/fs/cgroup/memory.current", "");
    int64_t left = machine < 0 ? INT64_MAX : machine * 1024;
    if (most >= 0 && used >= 0 && most - used < left)
        left = most > used ? most - used : 0;
    return left;
}
