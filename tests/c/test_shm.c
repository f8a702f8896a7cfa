/* test_shm.c: collectives between forked ranks: every op, dtype and size;
 * order, overlap, groups. */
#include "world.h"
#include "../../runtime/base/types.h"

/* Whole numbers that every dtype holds exactly, also summed over eight ranks. */
static double value(int rank, int64_t i) { return (double)((i * 7 + rank * 5) % 11 - 3); }
static double unsigned_value(int rank, int64_t i) { return value(rank, i) + 3; }

static void put(void *x, int dtype, int64_t i, double v) {
    switch (dtype) {
    case PG_F32: ((float *)x)[i] = (float)v; break;
    case PG_F64: ((double *)x)[i] = v; break;
    case PG_BF16: ((uint16_t *)x)[i] = pg_f32_to_bf16((float)v); break;
    case PG_F16: ((uint16_t *)x)[i] = pg_f32_to_f16((float)v); break;
    case PG_I32: ((int32_t *)x)[i] = (int32_t)v; break;
    case PG_I64: ((int64_t *)x)[i] = (int64_t)v; break;
    case PG_I16: ((int16_t *)x)[i] = (int16_t)v; break;
    default: ((uint8_t *)x)[i] = (uint8_t)v;
    }
}

static double get(const void *x, int dtype, int64_t i) {
    switch (dtype) {
    case PG_F32: return (double)((const float *)x)[i];
    case PG_F64: return ((const double *)x)[i];
    case PG_BF16: return (double)pg_bf16_to_f32(((const uint16_t *)x)[i]);
    case PG_F16: return (double)pg_f16_to_f32(((const uint16_t *)x)[i]);
    case PG_I32: return ((const int32_t *)x)[i];
    case PG_I64: return (double)((const int64_t *)x)[i];
    case PG_I16: return ((const int16_t *)x)[i];
    default: return ((const uint8_t *)x)[i];
    }
}

static double reduced(int size, int64_t i, int op) {
    double r = value(0, i);
    for (int k = 1; k < size; k++) {
        double v = value(k, i);
        r = op == PG_OP_SUM ? r + v : op == PG_OP_MAX ? fmax(r, v) : fmin(r, v);
    }
    return r;
}

static void check_allreduce(world *w, void *x, int64_t n, int dtype, int op) {
    void *t;
    for (int64_t i = 0; i < n; i++) put(x, dtype, i, value(w->rank, i));
    must_ok(w->ops->allreduce(w->group, x, n, dtype, op, &t));
    must_end(w, t);
    for (int64_t i = 0; i < n; i++) must(get(x, dtype, i) == reduced(w->size, i, op));
}

static void check_reducescatter(world *w, void *x, void *y, int64_t n, int dtype, int op) {
    void *t;
    for (int64_t i = 0; i < n * w->size; i++) put(x, dtype, i, value(w->rank, i));
    must_ok(w->ops->reducescatter(w->group, y, x, n, dtype, op, &t));
    must_end(w, t);
    for (int64_t i = 0; i < n; i++) must(get(y, dtype, i) == reduced(w->size, w->rank * n + i, op));
}

static void check_allgather(world *w, void *x, void *y, int64_t n, int dtype, int in_place) {
    void *t, *mine = in_place ? (char *)y + w->rank * n * pg_dtype_size(dtype) : x;
    for (int64_t i = 0; i < n; i++) put(mine, dtype, i, unsigned_value(w->rank, i));
    must_ok(w->ops->allgather(w->group, y, mine, n, dtype, &t));
    must_end(w, t);
    for (int64_t i = 0; i < n * w->size; i++)
        must(get(y, dtype, i) == unsigned_value((int)(i / n), i % n));
}

static void check_broadcast(world *w, void *x, int64_t n, int dtype, int root) {
    void *t;
    for (int64_t i = 0; i < n; i++) put(x, dtype, i, unsigned_value(w->rank, i));
    must_ok(w->ops->broadcast(w->group, x, n, dtype, root, &t));
    must_end(w, t);
    for (int64_t i = 0; i < n; i++) must(get(x, dtype, i) == unsigned_value(root, i));
}

/* Round the ring, all at once. */
static void check_pairs(world *w, void *x, void *y, int64_t n, int dtype) {
    int to = (w->rank + 1) % w->size, from = (w->rank + w->size - 1) % w->size;
    void *send, *recv;
    for (int64_t i = 0; i < n; i++) put(x, dtype, i, unsigned_value(w->rank, i));
    must_ok(w->ops->send(w->group, x, n, dtype, to, &send));
    must_ok(w->ops->recv(w->group, y, n, dtype, from, &recv));
    must_end(w, recv);
    must_end(w, send);
    for (int64_t i = 0; i < n; i++) must(get(y, dtype, i) == unsigned_value(from, i));
}

/* 300007 elements take several chunks in each dtype, the last one odd. */
static void everything(world *w) {
    static const int64_t sizes[] = {0, 1, 1001, 300007};
    void *x = malloc((size_t)(300007 * 8 * w->size)), *y = malloc((size_t)(300007 * 8 * w->size)),
         *t;
    must(x && y);
    for (int dtype = 0; dtype < PG_NDTYPES; dtype++)
        for (int s = 0; s < 4; s++) {
            int64_t n = sizes[s], part = s == 3 ? n / w->size : n;
            int summed = dtype != PG_U8 && dtype != PG_I16;
            for (int op = PG_OP_SUM; summed && op <= PG_OP_MIN; op++) {
                check_allreduce(w, x, n, dtype, op);
                check_reducescatter(w, x, y, part, dtype, op);
            }
            check_allgather(w, x, y, part, dtype, s & 1);
            check_broadcast(w, x, n, dtype, s % w->size);
            check_pairs(w, x, y, n, dtype);
        }
    must_ok(w->ops->barrier(w->group, &t));
    must_end(w, t);
    free(x);
    free(y);
}

static void all_ops_all_dtypes(void **state) {
    (void)state;
    static const int sizes[] = {2, 3, 4, 8};
    for (int i = 0; i < 4; i++) run_world(sizes[i], everything);
}

/* Sums that depend on their order are those of rank order, to the bit, small and large. */
static void rank_order(world *w) {
    enum { N = 70001 };
    float *x = malloc(N * 4);
    void *t;
    must(x);
    for (int n = 100; n <= N; n += N - 100) {
        for (int i = 0; i < n; i++) x[i] = 1e7f / (float)(w->rank + 1) + 0.37f * (float)i;
        must_ok(w->ops->allreduce(w->group, x, n, PG_F32, PG_OP_SUM, &t));
        must_end(w, t);
        for (int i = 0; i < n; i++) {
            float sum = 1e7f + 0.37f * (float)i;
            for (int r = 1; r < w->size; r++) sum += 1e7f / (float)(r + 1) + 0.37f * (float)i;
            must(memcmp(&sum, &x[i], 4) == 0);
        }
    }
    /* bf16 stays in f32 between ranks: 1 + 2^-8 + 2^-8 is not lost */
    uint16_t h = pg_f32_to_bf16(w->rank == 0 ? 1.0f : 1.0f / 256);
    must_ok(w->ops->allreduce(w->group, &h, 1, PG_BF16, PG_OP_SUM, &t));
    must_end(w, t);
    must(pg_bf16_to_f32(h) == 1.0f + 2.0f / 256);
    /* a NaN of any rank reaches all, also in max and min */
    for (int op = PG_OP_SUM; op <= PG_OP_MIN; op++) {
        float v = w->rank == 1 ? NAN : (float)w->rank;
        must_ok(w->ops->allreduce(w->group, &v, 1, PG_F32, op, &t));
        must_end(w, t);
        must(isnan(v));
    }
    free(x);
}

static void sums_in_rank_order(void **state) {
    (void)state;
    run_world(3, rank_order);
}

/* Many of one group in flight, done in issue order; the progress thread moves them meanwhile. */
static void overlap(world *w) {
    enum { M = 50, N = 20000 };
    float *x = malloc(M * N * sizeof *x);
    void *t[M];
    must(x);
    for (int i = 0; i < M * N; i++) x[i] = (float)(w->rank + i / N);
    for (int m = 0; m < M; m++) {
        must_ok(w->ops->allreduce(w->group, x + m * N, N, PG_F32, PG_OP_SUM, &t[m]));
        w->ops->detach(t[m]);
    }
    int done = 0;
    while (done == 0) { /* the main thread does nothing but sleep */
        usleep(1000);
        done = w->ops->done(t[M - 1]);
    }
    must(done == 1);
    for (int m = 0; m < M; m++) {
        must(w->ops->done(t[m]) == 1);
        must_end(w, t[m]);
        for (int i = 0; i < N; i++) must(x[m * N + i] == (float)(6 + 4 * m));
    }
    free(x);
}

static void asynchronous(void **state) {
    (void)state;
    run_world(4, overlap);
}

/* No send waits for its receiver: all are sent before any is received, in both directions; a long
 * one goes on in the background. */
static void send_first(world *w) {
    enum { M = 200, LONG = 1 << 20 };
    int peer = 1 - w->rank;
    void *sends[M], *big, *t;
    int64_t x[M], y;
    float *out = malloc(4 * LONG), *in = malloc(4 * LONG);
    must(out && in);
    for (int m = 0; m < M; m++) {
        x[m] = 1000 * w->rank + m;
        must_ok(w->ops->send(w->group, &x[m], 1, PG_I64, peer, &sends[m]));
        must(w->ops->done(sends[m]) == 1);
    }
    for (int i = 0; i < LONG; i++) out[i] = (float)(w->rank + i % 1000);
    must_ok(w->ops->send(w->group, out, LONG, PG_F32, peer, &big));
    w->ops->detach(big);
    must_ok(w->ops->barrier(w->group, &t));
    must_end(w, t);
    for (int m = 0; m < M; m++) {
        must_ok(w->ops->recv(w->group, &y, 1, PG_I64, peer, &t));
        must_end(w, t);
        must(y == 1000 * peer + m);
    }
    must_ok(w->ops->recv(w->group, in, LONG, PG_F32, peer, &t));
    must_end(w, t);
    for (int i = 0; i < LONG; i++) must(in[i] == (float)(peer + i % 1000));
    for (int m = 0; m < M; m++) must_end(w, sends[m]);
    must_end(w, big);
    free(out);
    free(in);
}

static void send_before_recv(void **state) {
    (void)state;
    run_world(2, send_first);
}

/* A pipeline of ranks receives in the background while its collectives go on. */
static void independent(world *w) {
    void *early, *t, *even = NULL;
    float late = 0, x = 1;
    int32_t list[] = {0, 2};
    if (w->rank % 2 == 0) must_ok(w->ops->split(&even, w->group, list, 2, "even"));
    if (w->rank == 1) must_ok(w->ops->recv(w->group, &late, 1, PG_F32, 0, &early));
    if (w->rank == 0) { /* blocked until rank 2 comes, far below */
        must_ok(w->ops->allreduce(even, &late, 1, PG_F32, PG_OP_SUM, &early));
        w->ops->detach(early);
    }
    for (int i = 0; i < 20; i++) {
        must_ok(w->ops->allreduce(w->group, &x, 1, PG_F32, PG_OP_MAX, &t));
        must_end(w, t);
    }
    if (w->rank == 0) {
        x = 7;
        must_ok(w->ops->send(w->group, &x, 1, PG_F32, 1, &t));
        must_end(w, t);
    }
    if (w->rank == 2) {
        late = 3;
        must_ok(w->ops->allreduce(even, &late, 1, PG_F32, PG_OP_SUM, &early));
    }
    must_end(w, early);
    must(late == (w->rank == 1 ? 7 : 3));
    w->ops->free(even);
}

static void blocked_ops_block_no_others(void **state) {
    (void)state;
    run_world(3, independent);
}

/* dp 4 x pp 4 x tp 2 of 32 ranks, each axis eight times over, plus all pairs of neighbours; more
 * than 256 groups in the world.  Freed groups give their slots back. */
static void mesh(world *w) {
    void *groups[3][8], *t;
    int at[3] = {w->rank / 8, w->rank / 2 % 4, w->rank % 2};
    static const int sizes[3] = {4, 4, 2}, strides[3] = {8, 2, 1};
    static const char *const names[3] = {"dp", "pp", "tp"};
    for (int again = 0; again < 2; again++) {
        for (int copy = 0; copy < 8; copy++)
            for (int axis = 0; axis < 3; axis++) {
                int32_t list[4];
                for (int i = 0; i < sizes[axis]; i++)
                    list[i] = w->rank + (i - at[axis]) * strides[axis];
                must_ok(
                    w->ops->split(&groups[axis][copy], w->group, list, sizes[axis], names[axis]));
            }
        for (int copy = 0; copy < 8; copy++)
            for (int axis = 0; axis < 3; axis++) {
                int32_t sum = w->rank, want = 0;
                must_ok(w->ops->allreduce(groups[axis][copy], &sum, 1, PG_I32, PG_OP_SUM, &t));
                must_end(w, t);
                for (int i = 0; i < sizes[axis]; i++)
                    want += w->rank + (i - at[axis]) * strides[axis];
                must(sum == want);
            }
        for (int copy = 0; copy < 8; copy++)
            for (int axis = 0; axis < 3; axis++) w->ops->free(groups[axis][copy]);
    }
}

static void groups_of_32_ranks(void **state) {
    (void)state;
    run_world(32, mesh);
}

/* A thousand calls by a common plan over overlapping groups, some waited for at once, some ten
 * calls later: sizes on both sides of every threshold, the numbers of each checked. */
typedef struct {
    void *ticket;
    double *x;
    int64_t n;
    double want; /* of every element */
} pending;

static void settle(world *w, pending *p) {
    if (!p->ticket) return;
    must_end(w, p->ticket);
    for (int64_t i = 0; i < p->n; i++) must(p->x[i] == p->want);
    free(p->x);
    p->ticket = NULL;
}

static void planned(world *w) {
    enum { CALLS = 1000, LATER = 10 };
    static const int32_t lists[4][4] = {{0, 1, 2, 3}, {1, 3}, {2, 0}, {3, 2, 1}};
    static const int sizes[4] = {4, 2, 2, 3};
    static const int64_t counts[6] = {0, 1, 900, 1100, 40000, 90000};
    void *groups[4] = {0};
    pending later[LATER] = {{0}};
    uint32_t random = 12345; /* the same plan on all ranks */
    for (int g = 0; g < 4; g++)
        for (int i = 0; i < sizes[g]; i++)
            if (lists[g][i] == w->rank)
                must_ok(w->ops->split(&groups[g], w->group, lists[g], sizes[g], "planned"));
    for (int call = 0; call < CALLS; call++) {
        random = random * 1664525u + 1013904223u;
        int g = random >> 30, root = (int)(random >> 8) % sizes[g], sum = random >> 20 & 1;
        int64_t n = counts[(random >> 12) % 6];
        if (!groups[g]) continue;
        pending p = {.x = malloc(90000 * sizeof(double)), .n = n};
        must(p.x);
        for (int64_t i = 0; i < n; i++) p.x[i] = w->rank + call;
        p.want = lists[g][root] + call;
        for (int i = 0; sum && i < sizes[g]; i++) p.want = (i ? p.want : 0) + lists[g][i] + call;
        if (sum) must_ok(w->ops->allreduce(groups[g], p.x, n, PG_F64, PG_OP_SUM, &p.ticket));
        else must_ok(w->ops->broadcast(groups[g], p.x, n, PG_F64, root, &p.ticket));
        if (random >> 16 & 3) { /* each rank might choose otherwise */
            w->ops->detach(p.ticket);
            settle(w, &later[call % LATER]);
            later[call % LATER] = p;
        } else {
            settle(w, &p);
        }
    }
    for (int i = 0; i < LATER; i++) settle(w, &later[i]);
    for (int g = 0; g < 4; g++) w->ops->free(groups[g]);
}

static void overlapping_groups(void **state) {
    (void)state;
    run_world(4, planned);
}

/* The list's order is the group's order. */
static void reversed(world *w) {
    int32_t list[] = {2, 0, 1}, x[3], mine = w->rank;
    void *g, *t;
    must_ok(w->ops->split(&g, w->group, list, 3, "turned"));
    must_ok(w->ops->allgather(g, x, &mine, 1, PG_I32, &t));
    must_end(w, t);
    must(x[0] == 2 && x[1] == 0 && x[2] == 1);
    w->ops->free(g);
}

static void groups_keep_the_list_order(void **state) {
    (void)state;
    run_world(3, reversed);
}

/* The four-byte allreduce is measured to be 20 us of processor time a rank pair on two cores; other
 * work on the machine may take the rest, so only a wait gone wrong (a sleep each) fails here. */
static void quick(world *w) {
    enum { TIMES = 2000 };
    float x = 1;
    void *t;
    int64_t start = pg_page_clock();
    for (int i = 0; i < TIMES; i++) {
        must_ok(w->ops->allreduce(w->group, &x, 1, PG_F32, PG_OP_MAX, &t));
        must_end(w, t);
    }
    double us = (double)(pg_page_clock() - start) / 1e3 / TIMES;
    if (w->rank == 0) printf("allreduce of 4 bytes, %d ranks: %.1f us\n", w->size, us);
    must(us < 5000);
}

static void small_ops_are_quick(void **state) {
    (void)state;
    run_world(8, quick);
}

static void refuses_wrong_worlds(void **state) {
    (void)state;
    void *map;
    refuses(PG_EINVAL, "1 to 256", pg_shm_create(0));
    refuses(PG_EINVAL, "257 ranks", pg_shm_create(257));
    refuses(PG_ECOMM, "file descriptor 999", pg_shm_map(&map, 999));
    FILE *f = tmpfile();
    assert_non_null(f);
    refuses(PG_ECOMM, "not this user's block", pg_shm_map(&map, fileno(f)));
    assert_int_equal(ftruncate(fileno(f), 1 << 20), 0);
    refuses(PG_ECOMM, "no block of ranks", pg_shm_map(&map, fileno(f)));
    fclose(f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_ops_all_dtypes),
        cmocka_unit_test(sums_in_rank_order),
        cmocka_unit_test(asynchronous),
        cmocka_unit_test(send_before_recv),
        cmocka_unit_test(blocked_ops_block_no_others),
        cmocka_unit_test(groups_of_32_ranks),
        cmocka_unit_test(overlapping_groups),
        cmocka_unit_test(groups_keep_the_list_order),
        cmocka_unit_test(small_ops_are_quick),
        cmocka_unit_test(refuses_wrong_worlds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
