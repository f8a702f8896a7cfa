/* events.c: append scalars and texts to a TensorBoard event file.
 *
 * A record is u64 length, its masked crc32c, the data, its masked crc32c; the data is an Event of
 * tensorflow/core/util/event.proto, few enough fields to be written by hand.  Records gather in a
 * buffer and go out at flush.  A failed flush keeps them and is tried again at the same place, so a
 * disk that was full for a while leaves no torn record behind. */
#include "aside.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define BUFFER_BYTES ((size_t)64 << 10) /* gathered before they go out unasked */

typedef struct {
    uint8_t *at;
    size_t length, room;
    int failed;
} bytes;

struct pg_events {
    int fd;
    char *path;
    int64_t end;  /* bytes of whole records in the file */
    bytes buffer; /* records that are not in it yet */
};

/* ---- crc32c, Castagnoli, reflected; RFC 3720 B.4 ---- */
static uint32_t crc32c(const uint8_t *data, size_t n) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < n; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

/* The format masks checksums, as a checksum of data that holds checksums is weak. */
static uint32_t masked_crc(const uint8_t *data, size_t n) {
    uint32_t crc = crc32c(data, n);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* ---- bytes that grow, and protobuf's wire format in them ---- */
static void put(bytes *b, const void *data, size_t n) {
    if (b->length + n > b->room) {
        size_t room = 2 * b->room > b->length + n ? 2 * b->room : b->length + n + 64;
        uint8_t *grown = realloc(b->at, room);
        if (!grown) {
            b->failed = 1;
            return;
        }
        b->at = grown;
        b->room = room;
    }
    if (n) memcpy(b->at + b->length, data, n);
    b->length += n;
}

static void put_varint(bytes *b, uint64_t v) {
    uint8_t out[10];
    size_t n = 0;
    for (; v >= 128; v >>= 7) out[n++] = (uint8_t)(v | 128);
    out[n++] = (uint8_t)v;
    put(b, out, n);
}

enum wire { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };
static void put_key(bytes *b, int field, enum wire wire) {
    put_varint(b, (uint64_t)(field << 3 | (int)wire));
}

static void put_bytes(bytes *b, int field, const void *data, size_t n) {
    put_key(b, field, WIRE_BYTES);
    put_varint(b, n);
    put(b, data, n);
}

/* A message inside a message; frees it. */
static void put_message(bytes *b, int field, bytes *inner) {
    put_bytes(b, field, inner->at, inner->length);
    b->failed |= inner->failed;
    free(inner->at);
}

/* ---- records ---- */
int pg_events_flush(pg_events *e) {
    if (!e) return pg_fail(PG_EINVAL, "events: flush: NULL");
    if (e->buffer.length == 0) return PG_OK;
    PG_TRY(pg_file_write_at(e->fd, e->path, e->buffer.at, (int64_t)e->buffer.length, e->end));
    e->end += (int64_t)e->buffer.length;
    e->buffer.length = 0;
    return PG_OK;
}

/* Little-endian: the file's order and, here, the machine's. */
static int add_record(pg_events *e, const bytes *data) {
    bytes *b = &e->buffer;
    uint64_t length = data->length;
    if (b->length >= BUFFER_BYTES) PG_TRY(pg_events_flush(e)); /* full disk: this record is lost */
    size_t before = b->length;
    uint32_t crc = masked_crc((const uint8_t *)&length, sizeof length);
    put(b, &length, sizeof length);
    put(b, &crc, sizeof crc);
    put(b, data->at, data->length);
    crc = masked_crc(data->at, data->length);
    put(b, &crc, sizeof crc);
    if (data->failed || b->failed) {
        b->length = before;
        b->failed = 0;
        return pg_fail(PG_ENOMEM, "events: no memory for a record of %zu bytes", data->length);
    }
    return PG_OK;
}

/* Event: 1 wall_time double, 2 step int64, then `what` (3 file_version, 5 summary); frees it. */
static int add_event(pg_events *e, int64_t step, int what, bytes *content) {
    bytes event = {0};
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    put_key(&event, 1, WIRE_64);
    put(&event, &seconds, sizeof seconds);
    if (step) { /* 0 is what a missing field means */
        put_key(&event, 2, WIRE_VARINT);
        put_varint(&event, (uint64_t)step);
    }
    put_message(&event, what, content);
    int rc = add_record(e, &event);
    free(event.at);
    return rc;
}

/* A tag that is no UTF-8 would make readers give up the whole file. */
static int check(const pg_events *e, const char *tag) {
    json_t *s = tag ? json_string(tag) : NULL;
    json_decref(s);
    if (!e || !s) return pg_fail(PG_EINVAL, "events: the tag is missing or no valid UTF-8");
    return PG_OK;
}

/* Summary.Value: 1 tag, 2 simple_value float. */
int pg_events_scalar(pg_events *e, const char *tag, int64_t step, double value) {
    PG_TRY(check(e, tag));
    bytes v = {0}, summary = {0};
    float single = (float)value;
    put_bytes(&v, 1, tag, strlen(tag));
    put_key(&v, 2, WIRE_32);
    put(&v, &single, sizeof single);
    put_message(&summary, 1, &v);
    return add_event(e, step, 5, &summary);
}

/* Summary.Value: 1 tag, 8 TensorProto {1 dtype, 2 shape {2 dim {1 size}}, 8 string_val}, 9 metadata
 * {1 plugin {1 name}}: a text is a tensor of one string that the plug-in "text" shows. */
int pg_events_text(pg_events *e, const char *tag, int64_t step, const char *text) {
    PG_TRY(check(e, tag));
    if (!text) return pg_fail(PG_EINVAL, "events: text: NULL");
    bytes dim = {0}, shape = {0}, tensor = {0}, plugin = {0}, metadata = {0}, v = {0},
          summary = {0};
    put_key(&dim, 1, WIRE_VARINT);
    put_varint(&dim, 1);
    put_message(&shape, 2, &dim);
    put_key(&tensor, 1, WIRE_VARINT);
    put_varint(&tensor, 7); /* DT_STRING */
    put_message(&tensor, 2, &shape);
    put_bytes(&tensor, 8, text, strlen(text));
    put_bytes(&plugin, 1, "text", 4);
    put_message(&metadata, 1, &plugin);
    put_bytes(&v, 1, tag, strlen(tag));
    put_message(&v, 8, &tensor);
    put_message(&v, 9, &metadata);
    put_message(&summary, 1, &v);
    return add_event(e, step, 5, &summary);
}

/* ---- the file ---- */
/* events.out.tfevents.SECONDS.HOST.PID.N: N tells apart those of one process in one second. */
static int create(pg_events *e, const char *folder) {
    for (int n = 0; n < 1000; n++) {
        free(e->path);
        if (asprintf(&e->path, "%s/events.out.tfevents.%010lld.%s.%d.%d", folder,
                     (long long)time(NULL), pg_fs_hostname(), (int)getpid(), n) < 0) {
            e->path = NULL;
            return pg_fail(PG_ENOMEM, "events: %s: no memory", folder);
        }
        e->fd = open(e->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (e->fd >= 0) return PG_OK;
        if (errno != EEXIST) break;
    }
    return pg_fail(PG_EIO, "events: %s: %m", e->path);
}

int pg_events_open(pg_events **out, const char *folder) {
    if (!out || !folder) return pg_fail(PG_EINVAL, "events: open: NULL");
    *out = NULL;
    PG_TRY(pg_fs_mkdir(folder));
    pg_events *e = calloc(1, sizeof *e);
    if (!e) return pg_fail(PG_ENOMEM, "events: %s: no memory", folder);
    e->fd = -1;
    bytes version = {0};
    int rc = create(e, folder);
    if (rc == PG_OK) {
        put(&version, "brain.Event:2", 13); /* each file must begin with it */
        rc = add_event(e, 0, 3, &version);
    }
    if (rc == PG_OK) rc = pg_events_flush(e);
    if (rc < 0) pg_events_close(e);
    else *out = e;
    return rc;
}

void pg_events_close(pg_events *e) {
    if (!e) return;
    if (e->fd >= 0) {
        pg_events_flush(e); /* whoever cares about its error has flushed before */
        close(e->fd);
    }
    free(e->buffer.at);
    free(e->path);
    free(e);
}
