// Times of an MPI library's collectives: `mpiexec -n RANKS mpi_bench DIRECTORY`, commands as for
// collective_bench.cc. Without an argument it prints the library's name and version.

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, ranks;

// The collective of one command. A tensor has `whole` floats on each rank; where it consists of
// parts, there is one for each rank.
struct measurement {
  const char* name;
  float* input;
  float* output;
  size_t whole;
  size_t part;
};

static int is(const struct measurement* self, const char* name) {
  return strcmp(self->name, name) == 0;
}

static void once(struct measurement* self, int call) {
  const int part = (int)self->part;
  if (is(self, "all_reduce")) {
    MPI_Allreduce(MPI_IN_PLACE, self->input, (int)self->whole, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  } else if (is(self, "broadcast")) {
    // The root goes round: a fixed one would be ahead of its receivers.
    MPI_Bcast(self->input, (int)self->whole, MPI_FLOAT, call % ranks, MPI_COMM_WORLD);
  } else if (is(self, "all_gather")) {
    MPI_Allgather(self->input, part, MPI_FLOAT, self->output, part, MPI_FLOAT, MPI_COMM_WORLD);
  } else if (is(self, "reduce_scatter")) {
    MPI_Reduce_scatter_block(self->input, self->output, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  } else if (is(self, "all_to_all")) {
    MPI_Alltoall(self->input, part, MPI_FLOAT, self->output, part, MPI_FLOAT, MPI_COMM_WORLD);
  } else {
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

static void fill(float* data, size_t count, float value) {
  for (size_t i = 0; i < count; ++i) data[i] = value;
}

// Whether the result of one call is right.
static int check(struct measurement* self, size_t space) {
  const int sums = is(self, "all_reduce") || is(self, "reduce_scatter");
  const int in_place = is(self, "all_reduce") || is(self, "broadcast") || is(self, "barrier");
  const float expected = sums ? (float)ranks : 1.0f;
  fill(self->input, space, 1.0f);
  once(self, 0);
  const float* result = in_place ? self->input : self->output;
  const size_t count = in_place                     ? self->whole
                       : is(self, "reduce_scatter") ? self->part
                                                    : self->part * (size_t)ranks;
  int right = 1;
  for (size_t i = 0; i < count && !is(self, "barrier"); ++i) right &= result[i] == expected;
  fill(self->input, space, 0.0f);  // Its sum with itself stays what it is.
  return right;
}

static double measure(struct measurement* self, int calls) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double began = MPI_Wtime();
  for (int call = 0; call < calls; ++call) once(self, call);
  return MPI_Wtime() - began;
}

static void answer(FILE* answers, const char* name, size_t bytes, int calls) {
  struct measurement self = {.name = name, .whole = bytes / sizeof(float)};
  if (self.whole == 0) self.whole = 1;
  self.part = self.whole / (size_t)ranks;
  if (self.part == 0) self.part = 1;
  const size_t parts = self.part * (size_t)ranks;
  const size_t space = self.whole > parts ? self.whole : parts;
  self.input = malloc(space * sizeof(float));
  self.output = malloc(space * sizeof(float));
  if (self.input == NULL || self.output == NULL) {
    fprintf(answers, "%d error: no memory\n", rank);
  } else {
    fill(self.output, space, 0.0f);
    if (check(&self, space)) {
      fprintf(answers, "%d %.9f\n", rank, measure(&self, calls));
    } else {
      fprintf(answers, "%d error: the result of %s is wrong\n", rank, name);
    }
  }
  free(self.input);
  free(self.output);
}

static int print_version(void) {
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  printf("%s\n", version);
  return 0;
}

static FILE* open_in(const char* directory, const char* name, const char* mode) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", directory, name);
  return fopen(path, mode);
}

int main(int argc, char** argv) {
  if (argc != 2) return print_version();
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  char name[32];
  snprintf(name, sizeof name, "rank-%d", rank);
  FILE* commands = open_in(argv[1], name, "r");
  FILE* answers = open_in(argv[1], "answers", "w");
  if (commands == NULL || answers == NULL) MPI_Abort(MPI_COMM_WORLD, 2);
  setvbuf(answers, NULL, _IOLBF, BUFSIZ);
  fprintf(answers, "%d ready\n", rank);
  char line[128];
  while (fgets(line, sizeof line, commands) != NULL && strcmp(line, "end\n") != 0) {
    size_t bytes = 0;
    int calls = 0;
    if (sscanf(line, "%31s %zu %d", name, &bytes, &calls) == 3) answer(answers, name, bytes, calls);
  }
  MPI_Finalize();
  return 0;
}
