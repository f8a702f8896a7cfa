/* status.c: the message of the last failure, one per thread, and the interrupt flag. */
#include "status.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MESSAGE_BYTES 2048
static _Thread_local char message[MESSAGE_BYTES];
static volatile sig_atomic_t interrupt_flag; /* set by the host's signal handler */

const char *pg_errmsg(void) { return message; }

int pg_fail(int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return code;
}

int pg_fail_within(int code, const char *format, ...) {
    char before[MESSAGE_BYTES], inner[MESSAGE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(before, sizeof before, format, args);
    va_end(args);
    memcpy(inner, message, sizeof inner);
    snprintf(message, sizeof message, "%.900s%.1100s", before, inner);
    return code;
}

void pg_interrupt(int raise) { interrupt_flag = raise; }
int pg_interrupted(void) { return interrupt_flag; }
