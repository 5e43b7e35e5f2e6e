// What a decision does for every block, worker and token. Each function has its numpy or Python reference beside its caller.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// -- block table: 16-byte key -> id of its set of holders, linear probing, id 0 = empty -------------------------------
typedef struct { uint64_t a, b; uint32_t id; } Slot;
typedef struct { Slot *slots; uint64_t mask, count, salt; } Table;

static inline uint64_t place(const Table *t, uint64_t a) {
    return ((a ^ t->salt) * 0x9E3779B97F4A7C15ull) >> 17 & t->mask;
}

void *table_new(uint64_t salt) {
    Table *t = malloc(sizeof *t);
    if (!t) return NULL;
    *t = (Table){calloc(1024, sizeof(Slot)), 1023, 0, salt};
    if (!t->slots) { free(t); return NULL; }
    return t;
}

void table_free(void *table) { free(((Table *)table)->slots); free(table); }

uint64_t table_len(const void *table) { return ((const Table *)table)->count; }

static inline Slot *find(const Table *t, const uint8_t *key) {
    uint64_t a, b;
    memcpy(&a, key, 8), memcpy(&b, key + 8, 8);
    for (uint64_t at = place(t, a);; at = (at + 1) & t->mask) {
        Slot *slot = &t->slots[at];
        if (!slot->id || (slot->a == a && slot->b == b)) return slot;
    }
}

static int grow(Table *t) {
    Table bigger = {calloc(2 * (t->mask + 1), sizeof(Slot)), 2 * t->mask + 1, t->count, t->salt};
    if (!bigger.slots) return -1;
    for (uint64_t at = 0; at <= t->mask; at++) {
        Slot *slot = &t->slots[at];
        if (slot->id) *find(&bigger, (const uint8_t *)slot) = *slot;
    }
    free(t->slots);
    *t = bigger;
    return 0;
}

static void erase(Table *t, Slot *slot) {  // shift back what was pushed behind it
    uint64_t hole = (uint64_t)(slot - t->slots);
    for (uint64_t at = (hole + 1) & t->mask; t->slots[at].id; at = (at + 1) & t->mask) {
        uint64_t home = place(t, t->slots[at].a);
        if (((at - home) & t->mask) >= ((at - hole) & t->mask)) {
            t->slots[hole] = t->slots[at];
            hole = at;
        }
    }
    t->slots[hole].id = 0;
    t->count--;
}

void table_get(const void *table, const uint8_t *keys, int64_t n, uint32_t *ids) {
    for (int64_t i = 0; i < n; i++) ids[i] = find(table, keys + 16 * i)->id;
}

int table_set(void *table, const uint8_t *keys, int64_t n, const uint32_t *ids) {  // -1: no memory
    Table *t = table;
    for (int64_t i = 0; i < n; i++) {
        if (10 * (t->count + 1) > 7 * (t->mask + 1) && grow(t)) return -1;
        Slot *slot = find(t, keys + 16 * i);
        if (!ids[i]) {
            if (slot->id) erase(t, slot);
            continue;
        }
        if (!slot->id) {
            memcpy(slot, keys + 16 * i, 16);
            t->count++;
        }
        slot->id = ids[i];
    }
    return 0;
}

int64_t table_runs(const void *table, const uint8_t *keys, int64_t n, uint32_t *ids, int32_t *lengths) {
    const Table *t = table;
    int64_t runs = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t id = find(t, keys + 16 * i)->id;
        if (!id) break;
        if (!runs || ids[runs - 1] != id) ids[runs++] = id;
        lengths[runs - 1] = (int32_t)(i + 1);
    }
    return runs;
}

// -- choice -----------------------------------------------------------------------------------------------------------
enum { UNCACHED, LOAD, QUEUED, ACTIVE_BLOCKS, ACTIVE_REQUESTS, NUM_FEATURES = 8 };

typedef struct {
    int64_t n;
    const double *features, *num_blocks, *max_requests, *queued_tokens, *tokens_per_s, *last_sent_s;
    const int64_t *device, *dram, *ssd;
} Pool;

static inline int32_t held_by(const Pool *p, const int32_t *lengths, int64_t i) {
    int32_t device = lengths[p->device[i]], dram = lengths[p->dram[i]], ssd = lengths[p->ssd[i]];
    int32_t host = dram > ssd ? dram : ssd;
    return device > host ? device : host;
}

static int64_t pick(const double *scores, const double *last_sent_s, int64_t n, double tie, uint64_t random) {
    double lowest = INFINITY, oldest = INFINITY;
    for (int64_t i = 0; i < n; i++) lowest = scores[i] < lowest ? scores[i] : lowest;
    int64_t ties = 0, chosen = -1;
    for (int64_t i = 0; i < n; i++)
        if (scores[i] <= lowest + tie) {
            if (last_sent_s[i] < oldest) oldest = last_sent_s[i], ties = 0;
            ties += last_sent_s[i] == oldest;
        }
    int64_t skip = ties ? (int64_t)(random % (uint64_t)ties) : 0;
    for (int64_t i = 0; i < n && chosen < 0; i++)
        if (scores[i] <= lowest + tie && last_sent_s[i] == oldest && skip-- == 0) chosen = i;
    return chosen;
}

// out: [NUM_FEATURES + 1][n], the features of this request and the scores. -1: nobody has room.
int64_t choose(const Pool *p, const double *weights, const int32_t *lengths, const int32_t *expected, double prompt_blocks,
               double need_blocks, double window, double slack, double tie, uint64_t random, double *out) {
    int64_t n = p->n, open = 0;
    double *scores = out + NUM_FEATURES * n, sum = 0;
    memcpy(out, p->features, sizeof(double) * (size_t)(NUM_FEATURES * n));
    const double *used = out + ACTIVE_BLOCKS * n, *requests = out + ACTIVE_REQUESTS * n;
    for (int64_t i = 0; i < n; i++) {
        int has_room = (requests[i] > 0 ? used[i] : 0) + need_blocks <= p->num_blocks[i] && requests[i] < p->max_requests[i];
        scores[i] = has_room ? 0 : INFINITY;
        open += has_room;
        sum += has_room ? requests[i] : 0;
    }
    if (!open) return -1;
    double limit = sum / (double)open * window + slack;
    for (int64_t i = 0; i < n; i++) {
        int32_t held = held_by(p, lengths, i), hoped = expected && expected[i] > held ? expected[i] : held;
        out[UNCACHED * n + i] = prompt_blocks - hoped;
        out[LOAD * n + i] = held - lengths[p->device[i]];
        if (requests[i] > limit) scores[i] = INFINITY;
        if (scores[i] == 0)
            for (int64_t f = 0; f < NUM_FEATURES; f++) scores[i] += weights[f] * out[f * n + i];
    }
    return pick(scores, p->last_sent_s, n, tie, random);
}

// Seconds until a prompt is computed at each prefill worker. out: [n]
int64_t choose_prefill(const Pool *p, const int32_t *lengths, double num_tokens, double block_size, double tie, uint64_t random, double *out) {
    for (int64_t i = 0; i < p->n; i++)
        out[i] = (p->queued_tokens[i] + num_tokens - held_by(p, lengths, i) * block_size) / p->tokens_per_s[i];
    return pick(out, p->last_sent_s, p->n, tie, random);
}

// -- similarity -------------------------------------------------------------------------------------------------------
static inline uint64_t shingle(const uint32_t *t) {
    uint64_t x = (t[0] + 1ull) * 0x9E3779B97F4A7C15ull + t[1] * 0xC2B2AE3D27D4EB4Full + t[2] * 0x165667B19E3779F9ull;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93ull;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93ull;
    return x ^ x >> 32;
}

// Add each shingle's weight to the lanes (a byte each) whose bit is set in its hash; at most 17 shingles, so that no lane overflows.
#define AT_ONCE 17
#ifdef __AVX2__
#include <immintrin.h>
static inline void add_lanes(uint8_t *narrow, const uint64_t *hashes, const uint8_t *weights, int64_t n) {
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    const __m256i low = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i high = _mm256_add_epi8(low, _mm256_set1_epi8(4));
    __m256i first = _mm256_setzero_si256(), second = first;
    for (int64_t i = 0; i < n; i++) {
        const __m256i words = _mm256_set1_epi64x((long long)hashes[i]), weight = _mm256_set1_epi8((char)weights[i]);
        __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(words, low), bit), bit);
        first = _mm256_add_epi8(first, _mm256_and_si256(is_set, weight));
        is_set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(words, high), bit), bit);
        second = _mm256_add_epi8(second, _mm256_and_si256(is_set, weight));
    }
    _mm256_storeu_si256((__m256i *)narrow, first);
    _mm256_storeu_si256((__m256i *)(narrow + 32), second);
}
#else
static uint64_t spread[256];  // a byte's bits, each in a byte of its own

__attribute__((constructor)) static void fill_spread(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0; bit < 8; bit++) spread[byte] |= (uint64_t)(byte >> bit & 1) << (8 * bit);
}

static inline void add_lanes(uint8_t *narrow, const uint64_t *hashes, const uint8_t *weights, int64_t n) {
    uint64_t lanes[8] = {0};
    for (int64_t i = 0; i < n; i++)
        for (int j = 0; j < 8; j++) lanes[j] += spread[hashes[i] >> (8 * j) & 255] * weights[i];
    memcpy(narrow, lanes, 64);
}
#endif

// SimHash of the shingles of 3 tokens that begin at `first` or later, at each of `ends` (ascending, counted in tokens).
// weights: [65536] of 0 to 15, by the top 16 bits of a shingle's hash. num_weighted: shingles of a weight above 0 up to each end.
void simhash(const uint32_t *tokens, int64_t first, const int64_t *ends, int64_t num_ends, const uint8_t *weights, uint64_t *sketches,
             int64_t *num_weighted) {
    int32_t lanes[64] = {0};
    int64_t weighted = 0, total = 0, at = first;
    for (int64_t e = 0; e < num_ends; e++) {
        while (at + 3 <= ends[e]) {
            uint64_t hashes[AT_ONCE];
            uint8_t some[AT_ONCE], narrow[64];
            int64_t n = ends[e] - 2 - at < AT_ONCE ? ends[e] - 2 - at : AT_ONCE;
            for (int64_t i = 0; i < n; i++) hashes[i] = shingle(tokens + at + i);
            for (int64_t i = 0; i < n; i++) {
                some[i] = weights[hashes[i] >> 48];
                weighted += some[i] > 0;
                total += some[i];
            }
            add_lanes(narrow, hashes, some, n);
            for (int j = 0; j < 64; j++) lanes[j] += narrow[j];
            at += n;
        }
        uint64_t sketch = 0;
        for (int j = 0; j < 64; j++) sketch |= (uint64_t)(2 * lanes[j] > total) << j;
        sketches[e] = sketch;
        num_weighted[e] = weighted;
    }
}

// Slots of the codes within `most` bits of `code`, at most `room` of them.
int64_t near(const uint64_t *codes, int64_t n, uint64_t code, int64_t most, int64_t room, int64_t *slots) {
    int64_t found = 0, at = 0;
    for (; at + 8 <= n && found + 8 <= room; at += 8) {  // eight at once, because hardly ever one is near
        int nearest = 64;
        for (int j = 0; j < 8; j++) {
            int bits = __builtin_popcountll(codes[at + j] ^ code);
            nearest = bits < nearest ? bits : nearest;
        }
        if (nearest > most) continue;
        for (int j = 0; j < 8; j++)
            if (__builtin_popcountll(codes[at + j] ^ code) <= most) slots[found++] = at + j;
    }
    for (; at < n && found < room; at++)
        if (__builtin_popcountll(codes[at] ^ code) <= most) slots[found++] = at;
    return found;
}
