// The block table: 16-byte key -> number of its set of holders, linear probing, number 0 = empty slot. How many keys each number has is
// counted; numbers may be marked as gone (nobody holds their keys any more), and their keys are swept out little by little.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_SLOTS 1024
#define FIRST_NUMBERS 1024
#define AHEAD 12  // keys whose slots are fetched before they are looked at: a miss of the cache costs more than the rest

typedef struct { uint64_t a, b; uint32_t number; } Slot;
typedef struct { uint32_t keys, is_gone; } Number;
typedef struct {
    Slot *slots;
    uint64_t mask, count, gone, salt;
    Number *numbers;
    uint32_t num_numbers;
} Table;

static inline uint64_t place(const Table *t, uint64_t a) {
    return ((a ^ t->salt) * 0x9E3779B97F4A7C15ull) >> 17 & t->mask;
}

void table_free(void *table) {
    Table *t = table;
    free(t->slots), free(t->numbers), free(t);
}

void *table_new(uint64_t salt) {
    Table *t = malloc(sizeof *t);
    if (!t) return NULL;
    *t = (Table){calloc(FIRST_SLOTS, sizeof(Slot)), FIRST_SLOTS - 1, 0, 0, salt, calloc(FIRST_NUMBERS, sizeof(Number)), FIRST_NUMBERS};
    if (t->slots && t->numbers) return t;
    table_free(t);
    return NULL;
}

uint64_t table_len(const void *table) { return ((const Table *)table)->count; }

uint64_t table_num_gone(const void *table) { return ((const Table *)table)->gone; }

static inline void fetch(const Table *t, const uint8_t *key) {
    uint64_t a;
    memcpy(&a, key, 8);
    __builtin_prefetch(&t->slots[place(t, a)]);
}

static inline Slot *find(const Table *t, const uint8_t *key) {
    uint64_t a, b;
    memcpy(&a, key, 8), memcpy(&b, key + 8, 8);
    for (uint64_t at = place(t, a);; at = (at + 1) & t->mask) {
        Slot *slot = &t->slots[at];
        if (!slot->number || (slot->a == a && slot->b == b)) return slot;
    }
}

static int grow(Table *t) {
    Table bigger = *t;
    bigger.mask = 2 * t->mask + 1;
    bigger.slots = calloc(bigger.mask + 1, sizeof(Slot));
    if (!bigger.slots) return -1;
    for (uint64_t at = 0; at <= t->mask; at++) {
        Slot *slot = &t->slots[at];
        if (slot->number) *find(&bigger, (const uint8_t *)slot) = *slot;
    }
    free(t->slots);
    *t = bigger;
    return 0;
}

static int has_number(Table *t, uint32_t number) {  // 0: no memory for it
    if (number < t->num_numbers) return 1;
    uint32_t size = t->num_numbers;
    while (size <= number) size *= 2;
    Number *more = realloc(t->numbers, size * sizeof(Number));
    if (!more) return 0;
    memset(more + t->num_numbers, 0, (size - t->num_numbers) * sizeof(Number));
    t->numbers = more;
    t->num_numbers = size;
    return 1;
}

static inline void leave(Table *t, uint32_t number) {
    t->numbers[number].keys--;
    t->gone -= t->numbers[number].is_gone;
    t->count--;
}

static inline void join(Table *t, uint32_t number) {
    t->numbers[number].keys++;
    t->gone += t->numbers[number].is_gone;
    t->count++;
}

static void erase(Table *t, Slot *slot) {  // shift back what was pushed behind it
    leave(t, slot->number);
    uint64_t hole = (uint64_t)(slot - t->slots);
    for (uint64_t at = (hole + 1) & t->mask; t->slots[at].number; at = (at + 1) & t->mask) {
        uint64_t home = place(t, t->slots[at].a);
        if (((at - home) & t->mask) >= ((at - hole) & t->mask)) {
            t->slots[hole] = t->slots[at];
            hole = at;
        }
    }
    t->slots[hole].number = 0;
}

// The numbers of n keys, as runs: numbers[r] up to but without key ends[r]. With `only_leading`, up to the first key that is absent.
int64_t table_runs(const void *table, const uint8_t *keys, int64_t n, int64_t only_leading, uint32_t *numbers, int32_t *ends) {
    const Table *t = table;
    int64_t runs = 0;
    for (int64_t i = 0; i < n && i < AHEAD; i++) fetch(t, keys + 16 * i);
    for (int64_t i = 0; i < n; i++) {
        if (i + AHEAD < n) fetch(t, keys + 16 * (i + AHEAD));
        uint32_t number = find(t, keys + 16 * i)->number;
        if (!number && only_leading) break;
        if (!runs || numbers[runs - 1] != number) numbers[runs++] = number;
        ends[runs - 1] = (int32_t)(i + 1);
    }
    return runs;
}

// Give each key its run's number; 0 deletes. -1: no memory, and the keys behind have what they had.
int table_assign(void *table, const uint8_t *keys, int64_t runs, const uint32_t *numbers, const int32_t *ends) {
    Table *t = table;
    for (int64_t r = 0, i = 0; r < runs; r++) {
        if (!has_number(t, numbers[r])) return -1;
        for (; i < ends[r]; i++) {
            if (10 * (t->count + 1) > 7 * (t->mask + 1) && grow(t)) return -1;
            Slot *slot = find(t, keys + 16 * i);
            if (slot->number == numbers[r]) continue;
            if (!numbers[r]) {
                erase(t, slot);
                continue;
            }
            if (slot->number) leave(t, slot->number);
            else memcpy(slot, keys + 16 * i, 16);
            join(t, slot->number = numbers[r]);
        }
    }
    return 0;
}

// Whether nobody holds the keys of a number. -1: no memory.
int table_mark(void *table, uint32_t number, uint32_t is_gone) {
    Table *t = table;
    if (!has_number(t, number)) return -1;
    Number *of = &t->numbers[number];
    t->gone += (uint64_t)of->keys * is_gone - (uint64_t)of->keys * of->is_gone;
    of->is_gone = is_gone;
    return 0;
}

void table_counts(const void *table, uint32_t n, uint32_t *counts) {
    const Table *t = table;
    for (uint32_t i = 0; i < n; i++) counts[i] = i < t->num_numbers ? t->numbers[i].keys : 0;
}

// Throw out keys of numbers that are gone, looking at `n` slots from `at` on. Returns where to go on.
uint64_t table_sweep(void *table, uint64_t at, int64_t n) {
    Table *t = table;
    for (; n > 0 && at <= t->mask; n--) {
        Slot *slot = &t->slots[at];
        if (slot->number && t->numbers[slot->number].is_gone) erase(t, slot);
        else at++;
    }
    return at <= t->mask ? at : 0;
}

// Every key and its number; room for `table_len` of them.
void table_content(const void *table, uint8_t *keys, uint32_t *numbers) {
    const Table *t = table;
    for (uint64_t at = 0, i = 0; at <= t->mask; at++)
        if (t->slots[at].number) {
            memcpy(keys + 16 * i, &t->slots[at], 16);
            numbers[i++] = t->slots[at].number;
        }
}
