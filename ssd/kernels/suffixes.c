/* The suffix memory's store: texts of tokens, in which it finds what followed the end of a text before. Texts lie in
   blocks of a ring: a new block takes the place of the oldest. Each token is linked to the last one before it that ends
   the same SHORT tokens, and to the last one that ends the same LONG ones, in any text of its scope (as zlib links
   strings). Links and heads may lead to what is gone, or to other tokens with the same hash: so tokens are always
   compared. */

#include "kernels.h"

#define BLOCK 64
#define SHORT 3
#define LONG 12
/* Places that are looked at for one search; more would make it slow where a text repeats itself. */
#define MOST_PLACES 16
static const int64_t LENGTHS[] = {SHORT, LONG};

/* A token's number is BLOCK times that of its block, and its place there: 32 bits of it are kept. */
typedef struct {
    uint64_t scope;
    int64_t before, after;     /* the blocks of the same text beside it, 0: none */
    int32_t count, before_end; /* of its tokens; the place in `before` of the token before its first */
} block_t;

typedef struct {
    block_t *block;
    const int32_t *tokens;
    int64_t number, offset;
} place_t;

static int32_t token_at(place_t place) { return place.tokens[place.offset]; }

static int lives(const suffixes_t *in, int64_t number) { return number >= in->next - in->blocks && number < in->next; }

static block_t *block_of(const suffixes_t *in, int64_t number) { return (block_t *)in->headers + number % in->blocks; }

/* Finds a block's token; returns 0 if it is gone. */
static int find_place(const suffixes_t *in, int64_t number, int64_t offset, place_t *place) {
    if (!lives(in, number) || offset >= block_of(in, number)->count) return 0;
    *place = (place_t){block_of(in, number), in->tokens + number % in->blocks * BLOCK, number, offset};
    return 1;
}

static int go_back(const suffixes_t *in, place_t *place) {
    return place->offset-- > 0 || find_place(in, place->block->before, place->block->before_end, place);
}

static int go_on(const suffixes_t *in, place_t *place) {
    if (++place->offset < BLOCK) return place->offset < place->block->count;
    return find_place(in, place->block->after, 0, place);
}

static uint64_t hash(const suffix_text_t *of, int64_t count) {
    uint64_t h = of->scope;
    for (int64_t i = SUFFIX_TAIL - count; i < SUFFIX_TAIL; i++) h = (h ^ (uint32_t)of->tail[i]) * 0x9e3779b97f4a7c15u;
    return (h ^ h >> 29) * 0xbf58476d1ce4e5b9u >> 32;
}

/* Begins the next block of a text. A text that began as another one does not go on in the other's blocks. */
static void begin_block(suffixes_t *in, suffix_text_t *text) {
    const int64_t number = in->next++, before = lives(in, text->block) ? text->block : 0;
    *block_of(in, number) = (block_t){text->scope, before, 0, 0, (int32_t)text->end};
    if (before && text->owns) block_of(in, before)->after = number;
    text->block = number, text->owns = 1;
}

static void put_last(suffix_text_t *text, int32_t token) {
    memmove(text->tail, text->tail + 1, (SUFFIX_TAIL - 1) * sizeof token);
    text->tail[SUFFIX_TAIL - 1] = token;
    text->length++;
}

static uint32_t *head_of(const suffixes_t *in, const suffix_text_t *text, int which) {
    return in->heads[which] + (hash(text, LENGTHS[which]) & in->mask);
}

static void add(suffixes_t *in, suffix_text_t *text, int32_t token) {
    if (!text->owns || !lives(in, text->block) || block_of(in, text->block)->count == BLOCK) begin_block(in, text);
    block_t *block = block_of(in, text->block);
    text->end = block->count++;
    const int64_t at = text->block % in->blocks * BLOCK + text->end;
    in->tokens[at] = token;
    put_last(text, token);
    for (int which = 0; which < 2; which++) {
        in->links[which][at] = 0;
        if (text->length < LENGTHS[which]) continue;
        uint32_t *head = head_of(in, text, which);
        in->links[which][at] = *head;
        *head = (uint32_t)(text->block * BLOCK + text->end);
    }
}

/* Adds tokens to the end of a text. */
void suffixes_add(suffixes_t *in, suffix_text_t *text, const int32_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count; i++) add(in, text, tokens[i]);
}

/* The number of tokens up to a place that are those at the end of the text, at most SUFFIX_TAIL. */
static int64_t matching(const suffixes_t *in, const suffix_text_t *text, place_t place) {
    const int64_t most = text->length < SUFFIX_TAIL ? text->length : SUFFIX_TAIL;
    for (int64_t n = 0; n < most; n++) {
        if (token_at(place) != text->tail[SUFFIX_TAIL - 1 - n]) return n;
        if (!go_back(in, &place)) return n + 1;
    }
    return most;
}

/* The number of the token that 32 bits of it mean: the latest. */
static int64_t number_of(const suffixes_t *in, uint32_t link) {
    const int64_t now = in->next * BLOCK;
    return now - (uint32_t)((uint32_t)now - link);
}

static uint32_t link_at(const suffixes_t *in, int which, int64_t number) {
    return in->links[which][number / BLOCK % in->blocks * BLOCK + number % BLOCK];
}

/* Collects the places with the longest matches among those that `link` leads to, latest first; returns how many. They
   are those of the matches' last tokens if `at_match`, else of the tokens that follow. */
static int64_t collect(const suffixes_t *in, const suffix_text_t *text, int which, uint32_t link, int at_match,
                       place_t *places, int64_t *longest) {
    int64_t found = 0;
    for (int64_t seen = 0; seen < MOST_PLACES; seen++) {
        const int64_t number = number_of(in, link);
        place_t place;
        if (!find_place(in, number / BLOCK, number % BLOCK, &place)) break;
        link = link_at(in, which, number);
        if (place.block->scope != text->scope) continue;
        const int64_t length = matching(in, text, place);
        if (length < LENGTHS[which] || length < *longest || (!at_match && !go_on(in, &place))) continue;
        if (length > *longest) found = 0;
        *longest = length;
        places[found++] = place;
    }
    return found;
}

/* Begins a text with its first tokens, as far as texts of its scope have them, piece by piece. These are not stored
   again, but for the last SUFFIX_TAIL of them: behind those the other text may go on otherwise. Returns the number of
   tokens that are not stored again: 0, or at least BLOCK. */
int64_t suffixes_begin(suffixes_t *in, suffix_text_t *text, const int32_t *tokens, int64_t count) {
    int64_t known = 0;
    place_t end;
    suffix_text_t ahead = *text;
    for (int64_t n = 0; n < count;) {
        place_t places[MOST_PLACES];
        int64_t longest = 0;
        for (; ahead.length < LONG && n < count; n++) put_last(&ahead, tokens[n]);
        if (known) put_last(&ahead, tokens[n++]);
        if (ahead.length < LONG) break;
        const int64_t found = collect(in, &ahead, 1, *head_of(in, &ahead, 1), 1, places, &longest);
        /* Where less than all that a search compares is alike, this text is stored. */
        if (!found || longest < (ahead.length < SUFFIX_TAIL ? ahead.length : SUFFIX_TAIL)) break;
        known = 0;
        for (int64_t i = 0; i < found; i++) {
            place_t place = places[i], next = place;
            int64_t m = n;
            for (; m < count && go_on(in, &next) && token_at(next) == tokens[m]; m++) place = next;
            if (m > known) known = m, end = place;
        }
        for (; n < known; n++) put_last(&ahead, tokens[n]);
    }
    if (known < BLOCK + SUFFIX_TAIL) return 0;
    for (int64_t i = 0; i < SUFFIX_TAIL; i++)
        if (!go_back(in, &end)) return 0;
    text->length = known - SUFFIX_TAIL, text->block = end.number, text->end = end.offset;
    memcpy(text->tail, tokens + text->length - SUFFIX_TAIL, sizeof text->tail);
    return text->length;
}

/* Finds at most `count` tokens that followed the longest known end of the text. Each is the token that most places have
   next; where two tokens have equally many, the one of the latest place. `votes` [count, 2]: the places that have it,
   and all that were left. Returns the number of tokens; `longest` is the length of the match, at most SUFFIX_TAIL. */
int64_t suffixes_find(const suffixes_t *in, const suffix_text_t *text, int64_t count, int32_t *tokens, int32_t *votes,
                    int64_t *longest) {
    place_t places[MOST_PLACES];
    *longest = 0;
    if (!lives(in, text->block)) return 0;
    const int64_t own = text->block * BLOCK + text->end;
    int64_t found = 0, made = 0;
    for (int which = 1; which >= 0 && !found; which--) {
        const uint32_t link = text->owns ? link_at(in, which, own) : *head_of(in, text, which);
        found = collect(in, text, which, link, 0, places, longest);
    }
    for (; made < count && found; made++) {
        int64_t best = 0, most = 0;
        for (int64_t i = 0; i < found; i++) {
            int64_t same = 0;
            for (int64_t j = i; j < found; j++) same += token_at(places[j]) == token_at(places[i]);
            if (same > most) best = i, most = same;
        }
        const int32_t token = token_at(places[best]);
        tokens[made] = token, votes[2 * made] = (int32_t)most, votes[2 * made + 1] = (int32_t)found;
        int64_t kept = 0;
        for (int64_t i = 0; i < found; i++) {
            place_t place = places[i];
            if (token_at(place) == token && go_on(in, &place)) places[kept++] = place;
        }
        found = kept;
    }
    return made;
}
