/* Simulated annealing over list schedules: the inner loop of native.py, which describes it. No contraction of floating
   point (pyproject.toml): the same plan on every machine.

   A candidate is a key per job (their order is the order of placement), a mode per job and a rank (which of the best
   nodes). Placement is greedy, as in space.py: the node with the earliest start, best fit among its workers. A mode
   beyond a job's own ones lets the placement choose: the mode that ends first, GPU-seconds weighed in.

   Every second restart of a step on idle workers runs backwards: dits first, then their encodes, which fill the ragged
   end; the schedule is read from its end. Threads do not share anything. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { JOBS = 96, NODES = 32, SIZE = 64, AUTO = 2 }; /* as in native.py */
static const double WEIGHT[AUTO] = {0.004, 0.03}; /* seconds of end that a GPU-second is worth */
static const double FIT = 1e-5, SELF = 0.4;

/* Raise it, here and in native.py, with every change of Space, of the arrays' sizes or of what anneal takes and leaves. */
int annealer_version(void) { return 1; }

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
} Space;

typedef struct { double key[JOBS]; int mode[JOBS], rank[JOBS]; } Genes;
typedef struct {
  double start[JOBS], end[JOBS], makespan, cost;
  int order[JOBS], mode[JOBS], node[JOBS][NODES]; /* node: 1 where the job takes a share */
} Schedule;

static _Thread_local uint64_t state;
static uint64_t draw(void) { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return state; }
static double uniform(void) { return (draw() >> 11) * (1.0 / 9007199254740992.0); }
static int below(int n) { return (int)(draw() % (uint64_t)n); }
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }

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

static void decode(const Space *p, const Genes *g, int back, Schedule *s) {
  double free[NODES][SIZE];
  const int size = p->size, nodes = p->nodes;
  for (int n = 0; n < nodes; n++) memcpy(free[n], p->free + n * size, sizeof(double) * size);
  const int32_t *from = back ? p->succ_from : p->pred_from, *list = back ? p->succs : p->preds;
  ordered(p, g, back, s->order);
  double makespan = 0.0;
  for (int position = 0; position < p->jobs; position++) {
    const int j = s->order[position], base = j * p->modes;
    int m = g->mode[j];
    double ready = p->release[j];
    if (p->waits[j] && ready < p->barrier) ready = p->barrier;
    for (int i = from[j]; i < from[j + 1]; i++) if (s->end[list[i]] > ready) ready = s->end[list[i]];
    if (m >= p->num_modes[j]) {
      const double weight = WEIGHT[m - p->num_modes[j]];
      double best = 1e300;
      m = 0;
      for (int option = 0; option < p->num_modes[j]; option++) {
        if (p->span[base + option] > 1) continue;
        const int k = p->degree[base + option];
        const double seconds = p->seconds[base + option];
        for (int n = 0; n < nodes; n++) {
          const double at = free[n][k - 1], start = at > ready ? at : ready;
          const double score = start + seconds + weight * k * seconds + FIT * (start - at);
          if (score < best) { best = score; m = option; }
        }
      }
    }
    const int span = p->span[base + m], share = p->degree[base + m] / span;
    double score[NODES];
    int picked[NODES];
    for (int n = 0; n < nodes; n++) {
      const double at = free[n][share - 1], start = at > ready ? at : ready;
      score[n] = start + FIT * (start - at);
    }
    int wanted = g->rank[j] > nodes - span ? nodes - span : g->rank[j], found = 0;
    uint32_t used = 0;
    for (int turn = 0; turn < wanted + span; turn++) {
      int best = -1;
      for (int n = 0; n < nodes; n++) if (!(used >> n & 1) && (best < 0 || score[n] < score[best])) best = n;
      used |= 1u << best;
      if (turn >= wanted) picked[found++] = best;
    }
    double start = ready;
    for (int i = 0; i < span; i++) if (free[picked[i]][share - 1] > start) start = free[picked[i]][share - 1];
    const double end = start + p->seconds[base + m];
    memset(s->node[j], 0, sizeof(int) * nodes);
    for (int i = 0; i < span; i++) { occupy(free[picked[i]], size, share, start, end); s->node[j][picked[i]] = 1; }
    s->start[j] = start;
    s->end[j] = end;
    s->mode[j] = m;
    if ((back || p->counts[j]) && end > makespan) makespan = end;
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
   result [J, 3 + NODES]: start, end, degree, then 1 for every node; order [J] of placement; figures
   makespan, cost, whether the best ran backwards, restarts until it was found. Returns the evaluations done. */
long anneal(const Space *p, const double *keys, const int32_t *modes, int num_starts, long evaluations, long length,
            int patience, double heat, double bound, double seconds, uint64_t seed, double *result, int32_t *order,
            double *figures) {
  static _Thread_local Genes current, trial;
  static _Thread_local Schedule found, best;
  const double deadline = now() + seconds;
  long done = 0, improved = 0;
  best.cost = best.makespan = 1e300;
  for (long restart = 0; done < evaluations; restart++) {
    if (restart > patience + 2 * improved) break;
    state = (seed + 1) * 2654435761u + (uint64_t)restart * 0x9E3779B97F4A7C15u + 88172645463325252u;
    for (int i = 0; i < 8; i++) draw();
    const int back = p->reversible && restart % 3 != 0;
    const long steps = length < evaluations - done ? length : evaluations - done;
    fresh(p, &current);
    if (!back && num_starts > 0 && (restart / 3 % 2 == 0 || p->ahead)) {
      const int which = (int)((p->ahead ? restart : restart / 3) % num_starts);
      memcpy(current.key, keys + which * p->jobs, sizeof(double) * p->jobs);
      for (int j = 0; j < p->jobs; j++) current.mode[j] = modes[which * p->jobs + j];
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
          double *row = result + j * (3 + NODES);
          row[0] = back ? found.makespan - found.end[j] : found.start[j];
          row[1] = back ? found.makespan - found.start[j] : found.end[j];
          row[2] = p->degree[j * p->modes + found.mode[j]];
          for (int n = 0; n < p->nodes; n++) row[3 + n] = found.node[j][n];
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
