/* SPDX-License-Identifier: Apache-2.0 */
/*
 * threads.c - work that threads share, each in the arithmetic that the specification wants.
 */
#include "base/threads.h"

#ifdef _OPENMP
#include <omp.h>
#include <stdatomic.h>
#endif

#include "base/os.h"

int nib_thread_count(const nib_device *device, int64_t elements)
{
    int threads = 1;
#ifdef _OPENMP
    threads = device && device->threads ? device->threads : omp_get_max_threads();
#else
    (void)device;
#endif
    if (!nib_threads_usable())
        return 1;
    return (int)nib_max(1, nib_min(threads, elements / NIB_ELEMENTS_PER_THREAD));
}

#ifdef _OPENMP
/* As many as can be started: OpenMP ends the process where one cannot. What was possible once is not tried again. */
static int startable(int threads)
{
    static atomic_int proven = 1;
    const int known = atomic_load(&proven);
    if (threads <= known)
        return threads;
    const int started = nib_os_start_threads(threads);
    if (started > known)
        atomic_store(&proven, started);
    return started;
}
#endif

static void run_serially(int64_t n, void (*body)(void *context, int64_t i), void *context)
{
    const nib_fpenv saved = nib_fpenv_enter();
    for (int64_t i = 0; i < n; i++)
        body(context, i);
    nib_fpenv_leave(saved);
}

void nib_parallel(int64_t n, int threads, void (*body)(void *context, int64_t i), void *context)
{
#ifdef _OPENMP
    if (threads > 1 && n > 1) /* otherwise not even a team of one: after a fork it could not be had */
        threads = startable(threads);
    if (threads > 1 && n > 1) {
#pragma omp parallel num_threads(threads)
        {
            const nib_fpenv saved = nib_fpenv_enter();
#pragma omp for schedule(static)
            for (int64_t i = 0; i < n; i++)
                body(context, i);
            nib_fpenv_leave(saved);
        }
        return;
    }
#else
    (void)threads; /* callers outside this file ask for as many as there are processors */
#endif
    run_serially(n, body, context);
}
