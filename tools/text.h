/* SPDX-License-Identifier: Apache-2.0 */
/*
 * text.h - how the tool puts sizes and decibels, and names that may be any bytes.
 */
#ifndef NIB_TEXT_H
#define NIB_TEXT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* "4.2 GB" and the like; the text is in buffer, which is returned. */
const char *text_bytes(uint64_t bytes, char *buffer, size_t size);
/* A number of decibels: "21.60", "same" where nothing differs. */
const char *text_db(double db, char *buffer, size_t size);
/* Whatever a terminal could take for a command becomes '?': names come from files that anyone may have written. */
void text_disarm(char *text);
/* Bytes of the character of UTF-8 that a text begins with; 0 for a control character, and for what is none. */
size_t text_character(const char *text);
/* Bits that each of so many values takes; 0 where there is none. */
double text_bits(uint64_t bytes, uint64_t values);
/* jansson says that a value could not be added to another one by a result that is easily lost, as the value is then. Call
 * the first before anything else: once an allocation of it failed, here or in the libraries, the second is true, and no
 * JSON is whole. */
void text_watch_memory(void);
bool text_lost_memory(void);
/* A report in JSON: the version of nib, that of the schema (docs/json.md) and the command, then `fields`, an object that
 * is gone afterwards. NULL for NULL, and without memory. */
json_t *text_report(const char *command, json_t *fields);
/* An object on standard output, which is then gone; false for NULL, and without memory. */
bool text_print(json_t *report);
/* The same into a file, and the value stays; flags are jansson's. False too where the file cannot be written. */
bool text_dump(FILE *file, const json_t *value, size_t flags);
/* JSON holds UTF-8 only, but a path may be any bytes: what is not ASCII is then replaced. NULL without memory. */
json_t *text_json(const char *text);
/* A number as JSON, which knows no infinities and no NaN: null for these. */
json_t *text_number(double number);

#endif
