// What a decision does for every block, worker and token. Each function has its numpy or Python reference beside its caller.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// -- choice -----------------------------------------------------------------------------------------------------------
enum { UNCACHED, LOAD, QUEUED, ACTIVE_BLOCKS, ACTIVE_REQUESTS, NUM_FEATURES = 8, NUM_TOLD = 4 };

typedef struct {
    double row, score, features[NUM_FEATURES];
} Told;

typedef struct {
    int64_t n;
    double block_size, window, slack, tie;
    const double *features, *num_blocks, *max_requests, *queued_tokens, *tokens_per_s, *last_sent_s;
    const int64_t *device, *dram, *ssd;
    double *scratch;  // [3][n]
    Told *told;       // [NUM_TOLD]
} Pool;

static inline int32_t held_by(const Pool *p, const int32_t *lengths, int64_t i) {
    int32_t device = lengths[p->device[i]], dram = lengths[p->dram[i]], ssd = lengths[p->ssd[i]];
    int32_t host = dram > ssd ? dram : ssd;
    return device > host ? device : host;
}

static inline int32_t hoped_at(const Pool *p, const int32_t *lengths, const int32_t *expected, int64_t i) {
    int32_t held = held_by(p, lengths, i);
    return expected && expected[i] > held ? expected[i] : held;
}

static int64_t pick(const Pool *p, const double *scores, uint64_t random) {
    const double *last_sent_s = p->last_sent_s, tie = p->tie;
    double lowest = INFINITY, oldest = INFINITY;
    int64_t n = p->n;
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

// The chosen one, then those of the lowest scores. Returns how many there are.
static int64_t tell(const Pool *p, const double *uncached, const double *load, const double *scores, int64_t chosen) {
    int64_t rows[NUM_TOLD] = {chosen}, count = 1;
    for (int64_t i = 0; i < p->n; i++) {
        if (i == chosen || scores[i] == INFINITY || (count == NUM_TOLD && scores[i] >= scores[rows[count - 1]])) continue;
        int64_t at = count < NUM_TOLD ? count++ : count - 1;
        for (; at > 1 && scores[rows[at - 1]] > scores[i]; at--) rows[at] = rows[at - 1];
        rows[at] = i;
    }
    for (int64_t at = 0; at < count; at++) {
        int64_t row = rows[at];
        Told *told = &p->told[at];
        told->row = (double)row, told->score = scores[row];
        for (int64_t f = 0; f < NUM_FEATURES; f++) told->features[f] = p->features[f * p->n + row];
        told->features[UNCACHED] = uncached[row], told->features[LOAD] = load[row];
    }
    return count;
}

// Returns how many candidates were told, the chosen one first; 0: nobody has room.
int64_t choose(const Pool *p, const double *weights, const int32_t *lengths, const int32_t *expected, double prompt_blocks,
               double need_blocks, uint64_t random) {
    int64_t n = p->n;
    double *restrict scores = p->scratch, *restrict uncached = scores + n, *restrict load = uncached + n, open = 0, sum = 0;
    const double *used = p->features + ACTIVE_BLOCKS * n, *requests = p->features + ACTIVE_REQUESTS * n;
    for (int64_t i = 0; i < n; i++) {
        int has_room = (requests[i] > 0 ? used[i] : 0) + need_blocks <= p->num_blocks[i] && requests[i] < p->max_requests[i];
        scores[i] = has_room ? 0 : INFINITY;
        open += has_room;
        sum += has_room ? requests[i] : 0;
    }
    if (!open) return 0;
    double limit = sum / open * p->window + p->slack;
    for (int64_t i = 0; i < n; i++) {
        uncached[i] = prompt_blocks - hoped_at(p, lengths, expected, i);
        load[i] = held_by(p, lengths, i) - lengths[p->device[i]];
        scores[i] = requests[i] > limit ? INFINITY : scores[i] + weights[UNCACHED] * uncached[i] + weights[LOAD] * load[i];
    }
    for (int64_t f = LOAD + 1; f < NUM_FEATURES; f++) {
        if (!weights[f]) continue;
        const double *feature = p->features + f * n;
        for (int64_t i = 0; i < n; i++) scores[i] += weights[f] * feature[i];
    }
    return tell(p, uncached, load, scores, pick(p, scores, random));
}

// Seconds until a prompt is computed at each prefill worker, into scratch. Returns the chosen one.
int64_t choose_prefill(const Pool *p, const int32_t *lengths, const int32_t *expected, double num_tokens, uint64_t random) {
    for (int64_t i = 0; i < p->n; i++)
        p->scratch[i] = (p->queued_tokens[i] + num_tokens - hoped_at(p, lengths, expected, i) * p->block_size) / p->tokens_per_s[i];
    return pick(p, p->scratch, random);
}

// -- similarity -------------------------------------------------------------------------------------------------------
#define AT_ONCE 17
#define CHUNK (16 * AT_ONCE)

// A token's hash: two of 32 bits, because these are computed eight at once.
static inline uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 15) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
}

static inline uint64_t rotated(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

// The hashes of n shingles: those of their tokens, each turned by its place.
static void hash_shingles(const uint32_t *tokens, int64_t n, uint64_t *hashes) {
    uint32_t low[CHUNK + 2], high[CHUNK + 2];
    for (int64_t i = 0; i < n + 2; i++) low[i] = mixed(tokens[i] * 0x9E3779B1u + 0x7F4A7C15u);
    for (int64_t i = 0; i < n + 2; i++) high[i] = mixed(tokens[i] * 0x27D4EB2Fu + 0x165667B1u);
    uint64_t whole[CHUNK + 2];
    for (int64_t i = 0; i < n + 2; i++) whole[i] = (uint64_t)high[i] << 32 | low[i];
    for (int64_t i = 0; i < n; i++) hashes[i] = whole[i] ^ rotated(whole[i + 1], 23) ^ rotated(whole[i + 2], 46);
}

// Add each shingle's weight to the lanes (a byte each) whose bit is set in its hash; at most 17 shingles, so that no lane overflows.
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
            uint64_t hashes[CHUNK];
            uint8_t some[CHUNK], narrow[64];
            uint16_t wide[64] = {0};
            int32_t some_weighted = 0, some_total = 0;
            int64_t n = ends[e] - 2 - at < CHUNK ? ends[e] - 2 - at : CHUNK;
            hash_shingles(tokens + at, n, hashes);
            for (int64_t i = 0; i < n; i++) some[i] = weights[hashes[i] >> 48];
            for (int64_t i = 0; i < n; i++) some_weighted += some[i] > 0, some_total += some[i];
            for (int64_t i = 0; i < n; i += AT_ONCE) {
                if (n - i < AT_ONCE) add_lanes(narrow, hashes + i, some + i, n - i);
                else add_lanes(narrow, hashes + i, some + i, AT_ONCE);  // a constant, for the compiler to unroll
                for (int j = 0; j < 64; j++) wide[j] += narrow[j];
            }
            for (int j = 0; j < 64; j++) lanes[j] += wide[j];
            weighted += some_weighted, total += some_total, at += n;
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
