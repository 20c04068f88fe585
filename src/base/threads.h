/* SPDX-License-Identifier: Apache-2.0 */
/*
 * threads.h - how many threads a call on the host uses, and how they share the work.
 */
#ifndef NIB_THREADS_H
#define NIB_THREADS_H

#include "base/device.h"

/* Call body(context, i) for i in 0..n-1 on so many threads, each in the arithmetic that the specification wants. Items
 * must not write the same bytes, so that neither order nor count matters. */
NIB_PRIVATE void nib_parallel(int64_t n, int threads, void (*body)(void *context, int64_t i), void *context);

/* Fewer elements than this are not worth a thread of their own. Measured by bench/threads.sh (Zen 4, libgomp): a team
 * of workers that still wait for work costs 2 us, and one that has gone to sleep 20 to 30 us. An element takes 0.06 ns
 * (decoding) to 0.2 ns (rows to nearest) in the cache, so that 2^16 of them are 4 to 13 us. With two threads of so many
 * each, decoding is 1.5 and quantizing 1.6 times as fast as with one if the workers are awake, as they are where one
 * call follows another. Sleeping workers pay from 2^18 elements (quantizing) and 2^19 (decoding) each on. */
#ifndef NIB_ELEMENTS_PER_THREAD
#define NIB_ELEMENTS_PER_THREAD (1 << 16)
#endif

/* The host with one thread, for callers who share the work among threads of their own. Never counted. */
NIB_PRIVATE nib_device *nib_serial_host(void);

/* How many threads of a host device (NULL: the default one) are worth it for so many elements. */
int nib_thread_count(const nib_device *device, int64_t elements);

#endif
