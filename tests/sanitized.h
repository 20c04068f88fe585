/* SPDX-License-Identifier: Apache-2.0 */
/* sanitized.h - SANITIZED: 1 where AddressSanitizer watches this file, else 0. */
#ifndef NIB_SANITIZED_H
#define NIB_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

#endif
