/* Simulated annealing over list schedules: the inner loop of native.py, which describes it. No contraction of floating
   point (pyproject.toml): the same plan on every machine.

   A candidate is a key per job (their order is the order of placement), a mode per job and a rank (which of the best
   nodes). Placement is greedy, as in space.py: the node with the earliest start, best fit among its workers. A mode
   beyond a job's own ones lets the placement choose: the mode that ends first, GPU-seconds weighed in.

   Where it matters who is in a bag (handoffs, rails, NVLink islands, unequal speeds), every worker is placed by name:
   see place_bag.

   Two of three restarts of a step on idle workers run backwards: dits first, then their encodes, which fill the ragged
   end; the schedule is read from its end. Threads do not share anything. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { JOBS = 96, NODES = 32, SIZE = 64, EDGES = 128, AUTO = 2, RANKS = 3 }; /* as in native.py */
static const double WEIGHT[AUTO] = {0.004, 0.03}; /* seconds of end that a GPU-second is worth */
static const double FIT = 1e-5, SELF = 0.4, FREE = 1e-9, NEVER = 1e15;

/* Raise it, here and in native.py, with every change of Space, of the arrays' sizes or of what anneal takes and leaves. */
int annealer_version(void) { return 3; }

typedef struct {
  int jobs, nodes, size, modes, chains, reversible, ahead;
  const int32_t *num_modes, *degree, *span;       /* [J], [J,M], [J,M] */
  const double *seconds;                          /* [J,M] */
  const int32_t *pred_from, *preds;               /* CSR: predecessors of j are preds[pred_from[j] .. pred_from[j+1]) */
  const int32_t *succ_from, *succs;
  const int32_t *chain_from, *chain;              /* CSR: jobs of a chain in precedence order */
  const double *release, *worth, *slack, *free;   /* [J], [J], [J], [G,S] sorted, NEVER where there is no worker */
  const int32_t *counts, *waits, *encode;         /* [J]; encode: may take a mode of its own choice */
  double barrier, workers;
  /* Only where workers are placed by name. A worker is a bit of its node's word. */
  int named, holds, rails, paces;                 /* holds: bags are drawn to the workers that have their inputs */
  const int32_t *who;                             /* [G,S] workers in the order of free */
  const double *delay;                            /* [J] of inputs that none of its bag holds; 0 where nothing is */
  const int32_t *early_from;                      /* CSR: what was encoded before this step for j */
  const double *early_end;
  const uint64_t *early_bag;                      /* [E,G] */
  const double *over, *detour;                    /* [J,M] seconds over nodes without a common rail; over islands */
  const double *fall;                             /* [R+1,R+1] share of `over` by common rails, by most of a node */
  const uint64_t *rail;                           /* [G,R] workers of a rail */
  const int32_t *island_from;                     /* CSR: NVLink islands of a node, the largest first */
  const uint64_t *island;
  const double *pace;                             /* [P] speeds of workers, ascending; 1 where all are equal */
  const uint64_t *quick;                          /* [P,G] workers that are at least so quick */
} Space;

typedef struct { double key[JOBS]; int mode[JOBS], rank[JOBS]; } Genes;
typedef struct {
  double start[JOBS], end[JOBS], makespan, cost;
  int order[JOBS], mode[JOBS];
  uint64_t bag[JOBS][NODES]; /* not 0 where the job takes a share: its workers, or 1 where they have no names */
} Schedule;

/* Free times of all nodes, sorted; where workers have names, who is free then, and when each of them is. */
typedef struct { double free[NODES][SIZE], of[NODES][SIZE]; int who[NODES][SIZE]; } Clock;

/* Inputs of a job: the earliest start of a bag that shares no worker with the one that made them. */
typedef struct { double at; const uint64_t *bag; } Edge;
typedef struct { Edge edge[EDGES]; int count; uint64_t held[NODES]; double ready; } Inputs;

/* Who of a node may be in a bag, and who has to be. */
typedef struct { uint64_t of, must; } Group;
static const Group ANYONE = {~0ull, 0};

static _Thread_local uint64_t state;
static uint64_t draw(void) { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return state; }
static double uniform(void) { return (draw() >> 11) * (1.0 / 9007199254740992.0); }
static int below(int n) { return (int)(draw() % (uint64_t)n); }
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }

/* Bits of a word; in line, as the compiler's own is a call where a machine may lack the instruction. */
static inline int count_of(uint64_t word) {
  word -= word >> 1 & 0x5555555555555555ull;
  word = (word & 0x3333333333333333ull) + (word >> 2 & 0x3333333333333333ull);
  return (int)(((word + (word >> 4)) & 0x0F0F0F0F0F0F0F0Full) * 0x0101010101010101ull >> 56);
}

/* Of the workers that are free at `start`, the `share` that were free last are busy until `end`; stays sorted. */
static void occupy(double *free, int size, int share, double start, double end) {
  int usable = 0, at = size - share;
  while (usable < size && free[usable] <= start + 1e-9) usable++;
  for (int i = usable - share; i < size - share; i++) free[i] = free[i + share];
  while (at > 0 && free[at - 1] > end) { free[at - 1 + share] = free[at - 1]; at--; }
  for (int i = 0; i < share; i++) free[at + i] = end;
}

static void ordered(const Space *p, const Genes *g, int back, int *order) {
  double key[JOBS];
  memcpy(key, g->key, sizeof(double) * p->jobs);
  for (int c = 0; c < p->chains; c++) { /* keys are dealt in precedence order within a chain */
    const int32_t *own = p->chain + p->chain_from[c];
    int length = p->chain_from[c + 1] - p->chain_from[c];
    double sorted[JOBS];
    for (int i = 0; i < length; i++) {
      double value = key[own[i]];
      int at = i;
      while (at > 0 && sorted[at - 1] > value) { sorted[at] = sorted[at - 1]; at--; }
      sorted[at] = value;
    }
    for (int i = 0; i < length; i++) key[own[back ? length - 1 - i : i]] = sorted[i];
  }
  for (int i = 0; i < p->jobs; i++) {
    int at = i;
    while (at > 0 && key[order[at - 1]] > key[i]) { order[at] = order[at - 1]; at--; }
    order[at] = i;
  }
}

/* The inputs of j: ends of what it waits for, and by when they are on a bag elsewhere. */
static void gather(const Space *p, const Schedule *s, int j, int back, Inputs *in) {
  const int32_t *from = back ? p->succ_from : p->pred_from, *list = back ? p->succs : p->preds;
  double ready = p->release[j];
  if (p->waits[j] && ready < p->barrier) ready = p->barrier;
  for (int i = from[j]; i < from[j + 1]; i++) if (s->end[list[i]] > ready) ready = s->end[list[i]];
  in->ready = ready;
  in->count = 0;
  if (!p->named) return;
  memset(in->held, 0, sizeof(uint64_t) * p->nodes);
  for (int i = from[j]; i < from[j + 1]; i++) {
    const double delay = p->delay[back ? list[i] : j];
    if (delay > 0.0) in->edge[in->count++] = (Edge){s->end[list[i]] + delay, s->bag[list[i]]};
  }
  for (int i = p->early_from[j]; i < p->early_from[j + 1]; i++)
    in->edge[in->count++] = (Edge){p->early_end[i] + p->delay[j], p->early_bag + i * p->nodes};
  for (int e = 0; e < in->count && p->holds; e++)
    for (int n = 0; n < p->nodes; n++) in->held[n] |= in->edge[e].bag[n];
}

/* When `share` workers of a group are free, `must` among them. */
static double opening(const Clock *c, int size, int n, int share, uint64_t group, uint64_t must) {
  if (!must && !~group) return c->free[n][share - 1];
  double start = 0.0;
  int need = share - count_of(must);
  for (uint64_t left = must; left; left &= left - 1) {
    const double at = c->of[n][__builtin_ctzll(left)];
    if (at > start) start = at;
  }
  for (int i = 0; i < size && need > 0; i++)
    if (1ull << c->who[n][i] & group & ~must && --need == 0 && c->free[n][i] > start) start = c->free[n][i];
  return need > 0 ? NEVER : start;
}

/* `bag`, and more of a group until they are `share`: of those free at `start` the ones free last; on ties those that
   hold inputs, then the last. Fewer where the group has no more. */
static uint64_t pick(const Clock *c, int size, int n, int share, double start, uint64_t group, uint64_t bag,
                     uint64_t held) {
  int need = share - count_of(bag), i = size - 1;
  while (i >= 0 && c->free[n][i] > start + FREE) i--;
  if (!(held & group & ~bag)) {
    for (; need > 0 && i >= 0; i--) {
      const uint64_t one = 1ull << c->who[n][i] & group & ~bag;
      bag |= one;
      need -= !!one;
    }
    return bag;
  }
  while (need > 0 && i >= 0) {
    int first = i;
    while (first > 0 && c->free[n][first - 1] == c->free[n][i]) first--;
    for (int pass = 0; pass < 2; pass++)
      for (int at = i; at >= first && need > 0; at--) {
        const uint64_t one = 1ull << c->who[n][at];
        if (!(one & group & ~bag) || (pass == 0) != !!(one & held)) continue;
        bag |= one;
        need--;
      }
    i = first - 1;
  }
  return bag;
}

/* Of several nodes the share of each: first the rails of those that must be in it, then those that most workers of
   every node are on, those that hold inputs, the first. */
static void pick_over(const Space *p, const Clock *c, const Inputs *in, const int *nodes, int span, int share,
                      const Group *group, double start, uint64_t *bag) {
  uint64_t usable[NODES];
  int order[SIZE], rank[SIZE][4];
  for (int i = 0; i < span; i++) {
    usable[i] = 0;
    for (int at = 0; at < p->size && c->free[nodes[i]][at] <= start + FREE; at++)
      usable[i] |= 1ull << c->who[nodes[i]][at] & group[i].of;
  }
  for (int r = 0; r < p->rails; r++) {
    int *own = rank[r], at = r;
    own[0] = own[2] = own[3] = 0;
    own[1] = SIZE;
    for (int i = 0; i < span; i++) {
      const uint64_t rail = p->rail[nodes[i] * p->rails + r];
      const int count = count_of(usable[i] & rail);
      own[0] |= !!(bag[nodes[i]] & rail);
      if (count < own[1]) own[1] = count;
      own[2] += count;
      own[3] += count_of(in->held[nodes[i]] & rail);
    }
    for (; at > 0; at--) {
      const int *other = rank[order[at - 1]];
      int k = 0;
      while (k < 3 && other[k] == own[k]) k++;
      if (other[k] >= own[k]) break;
      order[at] = order[at - 1];
    }
    order[at] = r;
  }
  for (int i = 0; i < span; i++)
    for (int at = 0; at < p->rails; at++)
      bag[nodes[i]] = pick(c, p->size, nodes[i], share, start, p->rail[nodes[i] * p->rails + order[at]] & group[i].of,
                           bag[nodes[i]], in->held[nodes[i]]);
}

/* The start of a bag of these nodes: its workers are free, and its inputs are there. `late` is the edge that it waits
   for, or -1. */
static double started(const Clock *c, const Inputs *in, const int *nodes, int span, const uint64_t *bag, int *late) {
  double start = in->ready;
  *late = -1;
  for (int i = 0; i < span; i++)
    for (uint64_t left = bag[nodes[i]]; left; left &= left - 1) {
      const double at = c->of[nodes[i]][__builtin_ctzll(left)];
      if (at > start) start = at;
    }
  for (int e = 0; e < in->count; e++) {
    uint64_t shared = 0;
    for (int i = 0; i < span; i++) shared |= bag[nodes[i]] & in->edge[e].bag[nodes[i]];
    if (!shared && in->edge[e].at > start) { start = in->edge[e].at; *late = e; }
  }
  return start;
}

/* The bag of these nodes that starts first: by best fit; or with a worker that made the inputs that it would wait for,
   and one of the next such. `group` [span]. Leaves `bag` where it starts before `best`; returns the start. */
static double settle(const Space *p, const Clock *c, const Inputs *in, const int *nodes, int span, int share,
                     const Group *group, double best, uint64_t *bag) {
  uint64_t must[NODES], trial[NODES];
  for (int i = 0; i < span; i++) must[nodes[i]] = group[i].must;
  for (;;) {
    double open = in->ready;
    int late, later;
    for (int i = 0; i < span; i++) {
      const double at = opening(c, p->size, nodes[i], share, group[i].of, must[nodes[i]]);
      if (at > open) open = at;
    }
    if (open >= best) return best;
    double start = open;
    for (int turn = 0; turn < 2; turn++) { /* a bag that waits for inputs leaves those alone that are free long before */
      for (int i = 0; i < span; i++) trial[nodes[i]] = must[nodes[i]];
      if (span > 1) pick_over(p, c, in, nodes, span, share, group, start, trial);
      else trial[nodes[0]] = pick(c, p->size, nodes[0], share, start, group->of, must[nodes[0]], in->held[nodes[0]]);
      const double found = started(c, in, nodes, span, trial, turn ? &later : &late);
      if (found < best || (turn && found <= start && start == best)) {
        best = found;
        for (int i = 0; i < span; i++) bag[nodes[i]] = trial[nodes[i]];
      }
      if (found <= open) break;
      start = found;
    }
    if (!p->holds || late < 0) return best;
    uint64_t one = 0;
    int where = -1;
    for (int i = 0; i < span; i++) {
      const int n = nodes[i];
      if (count_of(must[n]) == share) continue;
      for (uint64_t left = in->edge[late].bag[n] & group[i].of & ~must[n]; left; left &= left - 1)
        if (where < 0 || c->of[n][__builtin_ctzll(left)] < c->of[where][__builtin_ctzll(one)]) {
          one = left & -left;
          where = n;
        }
    }
    if (where < 0) return best;
    must[where] |= one;
  }
}

static int strays(const Space *p, int n, int share, uint64_t bag) {
  const uint64_t *island = p->island + p->island_from[n];
  const int count = p->island_from[n + 1] - p->island_from[n];
  int used = 0, least = 0, left = share;
  for (int i = 0; i < count; i++) {
    used += !!(bag & island[i]);
    least += left > 0;
    left -= count_of(island[i]);
  }
  return count > 1 && used > least;
}

/* The bag of one node that ends first: of all workers of a group; where islands cost time also of every island that is
   large enough, and of the few that have most workers free. Returns its start with what it takes longer. */
static double settle_node(const Space *p, const Clock *c, const Inputs *in, int n, int share, Group group,
                          double detour, uint64_t *bag) {
  const uint64_t *island = p->island + p->island_from[n];
  const int count = detour > 0.0 ? p->island_from[n + 1] - p->island_from[n] : 0;
  double best = settle(p, c, in, &n, 1, share, &group, NEVER, bag);
  if (!count || best >= NEVER || !strays(p, n, share, bag[n])) return best;
  best += detour;
  const double open = fmax(in->ready, opening(c, p->size, n, share, group.of, group.must));
  uint64_t few = 0, groups[SIZE + 1], trial[NODES];
  int room = 0;
  for (int i = 0; i < count && group.must; i++) if (island[i] & group.must) {
    few |= island[i];
    room += count_of(pick(c, p->size, n, SIZE, open, island[i] & group.of, 0, 0));
  }
  while (room < share) {
    int most = 0, which = 0;
    for (int i = 0; i < count; i++) {
      if (island[i] & few) continue;
      const int usable = count_of(pick(c, p->size, n, SIZE, open, island[i] & group.of, 0, 0));
      if (usable > most) { most = usable; which = i; }
    }
    few |= island[which];
    room += most;
  }
  int found = 0;
  groups[found++] = few;
  for (int i = 0; i < count; i++)
    if (count_of(island[i] & group.of) >= share && !(group.must & ~island[i])) groups[found++] = island[i];
  for (int i = 0; i < found; i++) {
    const Group own = {groups[i] & group.of, group.must};
    const double at = settle(p, c, in, &n, 1, share, &own, NEVER, trial);
    const double end = at + (at < NEVER && strays(p, n, share, trial[n]) ? detour : 0.0);
    if (end < best) { best = end; bag[n] = trial[n]; }
  }
  return best;
}

/* What is left of the seconds over nodes, by the rails that the nodes of a bag have in common. */
static double fall(const Space *p, const int *nodes, int span, const uint64_t *bag) {
  int common = 0, most = 0, own[NODES];
  for (int i = 0; i < span; i++) own[i] = 0;
  for (int r = 0; r < p->rails; r++) {
    int on = 0;
    for (int i = 0; i < span; i++) {
      const int used = !!(bag[nodes[i]] & p->rail[nodes[i] * p->rails + r]);
      on += used;
      own[i] += used;
    }
    common += on == span;
  }
  for (int i = 0; i < span; i++) if (own[i] > most) most = own[i];
  return p->fall[common * (p->rails + 1) + most];
}

/* These workers are busy until `end`; those of a node stay sorted by time, then by number. */
static void engage(Clock *c, int size, int n, uint64_t bag, double end) {
  int kept = 0;
  for (int i = 0; i < size; i++)
    if (!(bag >> c->who[n][i] & 1)) {
      c->who[n][kept] = c->who[n][i];
      c->free[n][kept++] = c->free[n][i];
    }
  for (uint64_t left = bag; left; left &= left - 1) {
    const int one = __builtin_ctzll(left);
    int at = kept++;
    for (; at > 0 && (c->free[n][at - 1] > end || (c->free[n][at - 1] == end && c->who[n][at - 1] > one)); at--) {
      c->who[n][at] = c->who[n][at - 1];
      c->free[n][at] = c->free[n][at - 1];
    }
    c->who[n][at] = one;
    c->free[n][at] = c->of[n][one] = end;
  }
}

/* `span` nodes with the lowest scores, after the `rank` lowest; on ties those that hold more. */
static void nodes_of(const Space *p, const double *score, const Inputs *in, int rank, int span, int *picked) {
  int wanted = rank > p->nodes - span ? p->nodes - span : rank, found = 0;
  uint32_t used = 0;
  for (int turn = 0; turn < wanted + span; turn++) {
    int best = -1;
    for (int n = 0; n < p->nodes; n++) {
      if (used >> n & 1) continue;
      if (best < 0 || score[n] < score[best] ||
          (in && score[n] == score[best] &&
           count_of(in->held[n]) > count_of(in->held[best]))) best = n;
    }
    used |= 1u << best;
    if (turn >= wanted) picked[found++] = best;
  }
}

/* Speed of the slowest worker of a bag on these nodes. */
static double pace_of(const Space *p, const int *nodes, int span, const uint64_t *bag) {
  int pace = p->paces - 1;
  for (int i = 0; i < span; i++) while (pace > 0 && bag[nodes[i]] & ~p->quick[pace * p->nodes + nodes[i]]) pace--;
  return p->pace[pace];
}

/* Workers of a node of which a bag has this pace: none slower, and, where there are quicker ones, the one of it that is
   free first. No one where the node has no bag of `share` workers with this pace. */
static Group group_of(const Space *p, const Clock *c, int n, int share, int pace) {
  const uint64_t own = p->quick[pace * p->nodes + n];
  const uint64_t quicker = pace + 1 < p->paces ? p->quick[(pace + 1) * p->nodes + n] : 0;
  if (p->paces == 1) return ANYONE;
  if (own == quicker || count_of(own) < share) return (Group){0, 0};
  if (quicker)
    for (int i = 0; i < p->size; i++) {
      const uint64_t one = 1ull << c->who[n][i];
      if (one & own & ~quicker) return (Group){own, one};
    }
  return (Group){own, 0};
}

/* A bag of a node: its rank falls with the score; its workers are known where the score needed them. */
typedef struct { int node; Group group; double score; uint64_t bag; } Option;

/* The `rank`-th best of bags by node and pace; on ties those that hold more. Returns the start. `more`: seconds longer
   than at best. */
static double place_on_node(const Space *p, const Clock *c, const Inputs *in, int at, int share, int rank, int *node,
                            double *more, uint64_t *bag) {
  Option found[RANKS];
  uint64_t trial[NODES];
  int count = 0, late;
  for (int n = 0; n < p->nodes; n++)
    for (int pace = 0; pace < p->paces; pace++) {
      const Group group = group_of(p, c, n, share, pace);
      if (!group.of) continue;
      const double free = opening(c, p->size, n, share, group.of, group.must);
      double begin = free > in->ready ? free : in->ready;
      uint64_t known = 0; /* the bag, where it had to be settled */
      int open = p->detour[at] > 0.0; /* whether it matters who of the node is taken */
      for (int e = 0; e < in->count; e++) {
        if (in->edge[e].bag[n]) open |= in->edge[e].at > begin;
        else if (in->edge[e].at > begin) begin = in->edge[e].at;
      }
      if (open && free < NEVER) {
        begin = settle_node(p, c, in, n, share, group, p->detour[at], trial);
        known = trial[n];
      }
      double score = begin + FIT * (begin - free);
      if (p->paces > 1) score += p->seconds[at] / p->pace[pace];
      int place = count < RANKS ? count++ : RANKS;
      for (; place > 0 && (score < found[place - 1].score || (score == found[place - 1].score &&
             count_of(in->held[n]) > count_of(in->held[found[place - 1].node]))); place--)
        if (place < RANKS) found[place] = found[place - 1];
      if (place < RANKS) found[place] = (Option){n, group, score, known};
    }
  const Option *best = found + (rank < count ? rank : count - 1);
  *node = best->node;
  *more = 0.0;
  if (best->score >= NEVER) return NEVER;
  bag[*node] = best->bag;
  if (!bag[*node]) {
    settle_node(p, c, in, *node, share, best->group, p->detour[at], trial);
    bag[*node] = trial[*node];
  }
  if (p->detour[at] > 0.0 && strays(p, *node, share, bag[*node])) *more = p->detour[at];
  return started(c, in, node, 1, bag, &late);
}

/* Of these nodes, or with the best of those that made the inputs for which the bag would wait: the bag that starts
   first, and its start. Leaves the nodes that it is on in `picked`. */
static double settle_over(const Space *p, const Clock *c, const Inputs *in, int *picked, int span, int share, int pace,
                          const double *score, uint64_t *bag) {
  Group group[NODES];
  uint64_t trial[NODES];
  int late, best = -1;
  for (int i = 0; i < span; i++)
    group[i] = p->paces > 1 ? (Group){p->quick[pace * p->nodes + picked[i]], 0} : ANYONE;
  double start = settle(p, c, in, picked, span, share, group, NEVER, bag);
  started(c, in, picked, span, bag, &late);
  for (int n = 0; n < p->nodes && late >= 0 && p->holds; n++)
    if (in->edge[late].bag[n] && c->free[n][share - 1] < NEVER && (best < 0 || score[n] < score[best])) best = n;
  for (int i = 0; i < span && best >= 0; i++) if (picked[i] == best) best = -1;
  if (best < 0) return start;
  int other[NODES];
  memcpy(other, picked, sizeof(int) * span);
  other[span - 1] = best;
  if (p->paces > 1) group[span - 1].of = p->quick[pace * p->nodes + best];
  const double found = settle(p, c, in, other, span, share, group, start, trial);
  if (found >= start) return start;
  memset(bag, 0, sizeof(uint64_t) * p->nodes);
  for (int i = 0; i < span; i++) bag[other[i]] = trial[other[i]];
  memcpy(picked, other, sizeof(int) * span);
  return found;
}

/* The bag of several nodes, after the `rank` best of them, that ends first: of all their workers, or of the quick ones
   alone. Returns the start. `more`: seconds longer than at best. */
static double place_over_nodes(const Space *p, const Clock *c, const Inputs *in, int at, int span, int share, int rank,
                               int *picked, double *more, uint64_t *bag) {
  double score[NODES], start = NEVER, first = NEVER;
  int best[NODES];
  uint64_t trial[NODES];
  for (int n = 0; n < p->nodes; n++) {
    score[n] = 2 * NEVER;
    for (int pace = 0; pace < p->paces; pace++) {
      const Group group = group_of(p, c, n, share, pace);
      if (!group.of) continue;
      const double free = opening(c, p->size, n, share, group.of, group.must);
      const double begin = free > in->ready ? free : in->ready;
      double own = begin + FIT * (begin - free);
      if (p->paces > 1) own += p->seconds[at] / p->pace[pace];
      if (own < score[n]) score[n] = own;
    }
  }
  nodes_of(p, score, in, rank, span, best);
  memcpy(picked, best, sizeof(int) * span);
  for (int pace = 0; pace < p->paces; pace++) {
    int own[NODES];
    memcpy(own, best, sizeof(int) * span);
    memset(trial, 0, sizeof(uint64_t) * p->nodes);
    const double found = settle_over(p, c, in, own, span, share, pace, score, trial);
    if (found >= NEVER) continue;
    const double longer = (fall(p, own, span, trial) - p->fall[p->rails * (p->rails + 1) + p->rails]) * p->over[at];
    const double end = found + (p->seconds[at] + longer) / pace_of(p, own, span, trial);
    if (end >= first) continue;
    first = end;
    start = found;
    *more = longer;
    memcpy(picked, own, sizeof(int) * span);
    memcpy(bag, trial, sizeof(uint64_t) * p->nodes);
  }
  return start;
}

/* Workers by name, for a mode of j. */
static void place_bag(const Space *p, Clock *c, const Inputs *in, int j, int m, int rank, Schedule *s) {
  const int at = j * p->modes + m, span = p->span[at], share = p->degree[at] / span;
  uint64_t *bag = s->bag[j];
  double more = 0.0;
  int picked[NODES];
  memset(bag, 0, sizeof(uint64_t) * p->nodes);
  const double start = span == 1 ? place_on_node(p, c, in, at, share, rank, picked, &more, bag)
                                 : place_over_nodes(p, c, in, at, span, share, rank, picked, &more, bag);
  const double end = start + (p->seconds[at] + more) / pace_of(p, picked, span, bag);
  for (int i = 0; i < span; i++) engage(c, p->size, picked[i], bag[picked[i]], end);
  s->start[j] = start;
  s->end[j] = end;
}

/* Workers without names, for a mode of j: as many as it wants of the best nodes, best fit. */
static void place(const Space *p, Clock *c, const Inputs *in, int j, int m, int rank, Schedule *s) {
  const int at = j * p->modes + m, span = p->span[at], share = p->degree[at] / span;
  double score[NODES], start = in->ready;
  int picked[NODES];
  for (int n = 0; n < p->nodes; n++) {
    const double free = c->free[n][share - 1], begin = free > in->ready ? free : in->ready;
    score[n] = begin + FIT * (begin - free);
  }
  nodes_of(p, score, 0, rank, span, picked);
  for (int i = 0; i < span; i++) if (c->free[picked[i]][share - 1] > start) start = c->free[picked[i]][share - 1];
  const double end = start + p->seconds[at];
  memset(s->bag[j], 0, sizeof(uint64_t) * p->nodes);
  for (int i = 0; i < span; i++) { occupy(c->free[picked[i]], p->size, share, start, end); s->bag[j][picked[i]] = 1; }
  s->start[j] = start;
  s->end[j] = end;
}

/* The mode in which j ends first, GPU-seconds weighed in. */
static int own_choice(const Space *p, const Clock *c, const Inputs *in, int j, double weight) {
  double best = 1e300, ready[NODES];
  int m = 0;
  for (int n = 0; n < p->nodes; n++) {
    ready[n] = in->ready;
    for (int e = 0; e < in->count; e++) if (!in->edge[e].bag[n] && in->edge[e].at > ready[n]) ready[n] = in->edge[e].at;
  }
  for (int option = 0; option < p->num_modes[j]; option++) {
    if (p->span[j * p->modes + option] > 1) continue;
    const int k = p->degree[j * p->modes + option];
    const double seconds = p->seconds[j * p->modes + option];
    for (int n = 0; n < p->nodes; n++)
      for (int pace = 0; pace < (p->named ? p->paces : 1); pace++) {
        const Group group = p->named ? group_of(p, c, n, k, pace) : ANYONE;
        if (!group.of) continue;
        const double at = opening(c, p->size, n, k, group.of, group.must), start = at > ready[n] ? at : ready[n];
        const double took = p->named ? seconds / p->pace[pace] : seconds;
        const double score = start + took + weight * k * took + FIT * (start - at);
        if (score < best) { best = score; m = option; }
      }
  }
  return m;
}

static void decode(const Space *p, const Genes *g, int back, Schedule *s) {
  Clock clock;
  Inputs in;
  for (int n = 0; n < p->nodes; n++) {
    memcpy(clock.free[n], p->free + n * p->size, sizeof(double) * p->size);
    for (int i = 0; i < p->size && p->named; i++) {
      clock.who[n][i] = p->who[n * p->size + i];
      clock.of[n][clock.who[n][i]] = clock.free[n][i];
    }
  }
  ordered(p, g, back, s->order);
  double makespan = 0.0;
  for (int position = 0; position < p->jobs; position++) {
    const int j = s->order[position];
    gather(p, s, j, back, &in);
    int m = g->mode[j];
    if (m >= p->num_modes[j]) m = own_choice(p, &clock, &in, j, WEIGHT[m - p->num_modes[j]]);
    if (p->named) place_bag(p, &clock, &in, j, m, g->rank[j], s);
    else place(p, &clock, &in, j, m, g->rank[j], s);
    s->mode[j] = m;
    if ((back || p->counts[j]) && s->end[j] > makespan) makespan = s->end[j];
  }
  if (makespan < p->barrier) makespan = p->barrier;
  s->makespan = makespan;
  /* The makespan, softened so that progress on any late item counts, plus what later steps will have to pay. */
  const double top = makespan - p->barrier > 1e-9 ? makespan - p->barrier : 1e-9;
  double sum = 0.0, left = 0.0, over = 0.0, delay = 0.0;
  int ends = 0;
  for (int j = 0; j < p->jobs; j++) {
    const int last = back ? p->pred_from[j] == p->pred_from[j + 1] : p->counts[j];
    if (last) {
      double r = (s->end[j] - p->barrier) / top;
      r = r > 0.0 ? r * r : 0.0;
      r = r * r;
      sum += r * r * r;
      ends++;
    } else if (p->ahead) {
      if (p->worth[j] > 0.0 && s->start[j] >= makespan - 1e-9) left += p->worth[j];
      else if (s->end[j] > makespan) {
        const double beyond = s->end[j] - makespan;
        over += beyond * p->degree[j * p->modes + s->mode[j]];
        if (beyond - p->slack[j] > delay) delay = beyond - p->slack[j];
      }
    }
  }
  const double soft = top * pow(sum / (ends ? ends : 1), 1.0 / 12.0);
  if (p->ahead) { s->cost = 0.75 * top + 0.25 * soft + left + delay + over / p->workers; return; }
  s->cost = 0.5 * top + 0.5 * soft;
}

/* Encodes mostly choose for themselves; bags over many nodes are drawn less often than their number suggests. */
static int drawn_mode(const Space *p, int j) {
  if (p->encode[j] && uniform() < SELF) return p->num_modes[j] + below(AUTO);
  const int m = below(p->num_modes[j]);
  return p->span[j * p->modes + m] > 1 ? below(p->num_modes[j]) : m;
}

static void fresh(const Space *p, Genes *g) {
  for (int j = 0; j < p->jobs; j++) {
    g->key[j] = uniform() * (p->worth[j] > 0.0 ? 1.6 : 1.0);
    g->mode[j] = p->encode[j] ? p->num_modes[j] : drawn_mode(p, j);
    g->rank[j] = 0;
  }
}

static void given(const Space *p, const double *keys, const int32_t *modes, int which, Genes *g) {
  memcpy(g->key, keys + which * p->jobs, sizeof(double) * p->jobs);
  for (int j = 0; j < p->jobs; j++) { g->mode[j] = modes[which * p->jobs + j]; g->rank[j] = 0; }
}

static void mutate(const Space *p, Genes *g) {
  for (int changes = uniform() < 0.3 ? 2 : 1; changes > 0; changes--) {
    const double kind = uniform();
    const int j = below(p->jobs);
    if (kind < 0.35) {
      g->key[j] = uniform() * (p->worth[j] > 0.0 ? 1.6 : 1.0);
    } else if (kind < 0.55) {
      const int other = below(p->jobs);
      const double key = g->key[j];
      g->key[j] = g->key[other];
      g->key[other] = key;
    } else if (kind < 0.92) {
      g->mode[j] = drawn_mode(p, j);
    } else {
      g->rank[j] = below(3);
    }
  }
}

/* `evaluations` in restarts of `length`, alternately from the `num_starts` given candidates and from random ones, until
   twice as many as the best needed and `patience` more found nothing better, `bound` is met or the seconds are over.
   result [J, 3]: start, end, degree; bags [J, NODES]; order [J] of placement; figures makespan, cost, whether the best
   ran backwards, restarts until it was found. Returns the evaluations done. */
long anneal(const Space *p, const double *keys, const int32_t *modes, int num_starts, long evaluations, long length,
            int patience, double heat, double bound, double seconds, uint64_t seed, double *result, uint64_t *bags,
            int32_t *order, double *figures) {
  static _Thread_local Genes current, trial;
  static _Thread_local Schedule found, best;
  const double deadline = now() + seconds;
  long done = 0, improved = 0;
  best.cost = best.makespan = 1e300;
  double least = 0.0;
  int foremost = 0; /* the given candidate that the first restart takes: the best where workers are of unequal speed */
  for (int which = 0; which < num_starts && p->paces > 1; which++) {
    given(p, keys, modes, which, &trial);
    decode(p, &trial, 0, &found);
    if (!which || found.cost < least) { least = found.cost; foremost = which; }
  }
  for (long restart = 0; done < evaluations; restart++) {
    if (restart > patience + 2 * improved) break;
    state = (seed + 1) * 2654435761u + (uint64_t)restart * 0x9E3779B97F4A7C15u + 88172645463325252u;
    for (int i = 0; i < 8; i++) draw();
    const int back = p->reversible && restart % 3 != 0;
    const long steps = length < evaluations - done ? length : evaluations - done;
    fresh(p, &current);
    if (!back && num_starts > 0 && (restart / 3 % 2 == 0 || p->ahead)) {
      const int which = (int)((p->ahead ? restart : restart / 3) % num_starts);
      given(p, keys, modes, which == 0 ? foremost : which == foremost ? 0 : which, &current);
    }
    double cost = 0.0;
    for (long step = 0; step < steps; step++) {
      if (step % 64 == 63 && now() > deadline) return done;
      trial = current;
      if (step) mutate(p, &trial);
      decode(p, &trial, back, &found);
      done++;
      const double cool = 1.0 - (double)step / steps, warmth = heat * (best.makespan - p->barrier) * cool * cool + 1e-9;
      const double worse = found.cost - cost;
      if (!step || worse <= 0.0 || (worse < 12.0 * warmth && uniform() < exp(-worse / warmth))) {
        current = trial;
        cost = found.cost;
      }
      const double margin = 1e-9 * (1.0 + fabs(best.cost));
      const int better = p->ahead ? found.cost < best.cost - margin
                                  : found.makespan < best.makespan - margin;
      if (better) {
        improved = restart;
        best = found;
        for (int j = 0; j < p->jobs; j++) {
          double *row = result + j * 3;
          row[0] = back ? found.makespan - found.end[j] : found.start[j];
          row[1] = back ? found.makespan - found.start[j] : found.end[j];
          row[2] = p->degree[j * p->modes + found.mode[j]];
          for (int n = 0; n < p->nodes; n++) bags[j * NODES + n] = found.bag[j][n];
          order[j] = found.order[j];
        }
        figures[0] = found.makespan;
        figures[1] = found.cost;
        figures[2] = back;
        figures[3] = (double)restart;
        if (!p->ahead && found.makespan <= bound * (1 + 1e-9)) return done;
      }
    }
  }
  return done;
}
