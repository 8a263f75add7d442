/* team.c: `share` calls `of` for each item from 0 to `items` - 1, below 2^32, in threads side by side; `team` says how
   many. Only one thread may call it at a time (Python's lock sees to that), and no item may. */

#pragma once

#include <stdint.h>

typedef void work_t(const void *arguments, int64_t item);

void share(int64_t items, work_t *of, const void *arguments);
int64_t team(void);
