/* The part of MPItrampoline's ABI 2.10 that JAX uses, on top of the MPI of this machine. cluster/mpi_wrapper.py puts
   CONSTANTS and MISSING before this text: JAX looks up all names of the ABI, so each must be there. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef uintptr_t Handle;

const int mpiabi_version_major = 2, mpiabi_version_minor = 10, mpiabi_version_patch = 0;
const int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 10, mpiwrapper_version_patch = 0;
void mpiwrapper_export_fortran_constants_(void) {}

/* Integers lie in the first bytes. */
#define DEFINE_CONSTANT(name) Handle name;
CONSTANTS(DEFINE_CONSTANT)

static void missing(const char *name) {
  fprintf(stderr, "JAX calls %s, which the library of `replicax mpi-collectives build` does not have. Unset "
                  "JAX_CPU_COLLECTIVES_IMPLEMENTATION: the workers then use gloo.\n", name);
  abort();
}

#define DEFINE_MISSING(name) int name(void) { missing(#name); return 1; }
MISSING(DEFINE_MISSING)

/* Open MPI knows the values only when it is loaded. All others stay 0: only missing functions take them. */
__attribute__((constructor)) static void set_constants(void) {
#define SET(name) MPIABI_##name = (Handle)MPI_##name;
  SET(SUCCESS) SET(UNDEFINED) SET(THREAD_FUNNELED) SET(COMM_WORLD) SET(STATUS_IGNORE)
  SET(SUM) SET(PROD) SET(MIN) SET(MAX)
  SET(BYTE) SET(INT8_T) SET(INT16_T) SET(INT32_T) SET(INT64_T) SET(UINT8_T) SET(UINT16_T) SET(UINT32_T) SET(UINT64_T)
  SET(FLOAT) SET(DOUBLE) SET(C_COMPLEX) SET(C_DOUBLE_COMPLEX)
}

int MPIABI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  return MPI_Init_thread(argc, argv, required, provided);
}
int MPIABI_Initialized(int *flag) { return MPI_Initialized(flag); }
int MPIABI_Finalized(int *flag) { return MPI_Finalized(flag); }
int MPIABI_Finalize(void) { return MPI_Finalize(); }
int MPIABI_Is_thread_main(int *flag) { return MPI_Is_thread_main(flag); }
int MPIABI_Get_library_version(char *text, int *length) { return MPI_Get_library_version(text, length); }
int MPIABI_Error_string(int code, char *text, int *length) { return MPI_Error_string(code, text, length); }

int MPIABI_Comm_rank(Handle comm, int *rank) { return MPI_Comm_rank((MPI_Comm)comm, rank); }
int MPIABI_Comm_size(Handle comm, int *size) { return MPI_Comm_size((MPI_Comm)comm, size); }
int MPIABI_Comm_split(Handle comm, int color, int key, Handle *part) {
  MPI_Comm made;
  int code = MPI_Comm_split((MPI_Comm)comm, color, key, &made);
  *part = (Handle)made;
  return code;
}
int MPIABI_Comm_free(Handle *comm) {
  MPI_Comm freed = (MPI_Comm)*comm;
  int code = MPI_Comm_free(&freed);
  *comm = (Handle)freed;
  return code;
}

int MPIABI_Allreduce(const void *from, void *to, int count, Handle type, Handle op, Handle comm) {
  return MPI_Allreduce(from, to, count, (MPI_Datatype)type, (MPI_Op)op, (MPI_Comm)comm);
}
int MPIABI_Reduce_scatter(const void *from, void *to, const int counts[], Handle type, Handle op, Handle comm) {
  return MPI_Reduce_scatter(from, to, counts, (MPI_Datatype)type, (MPI_Op)op, (MPI_Comm)comm);
}
int MPIABI_Allgather(const void *from, int count, Handle type, void *to, int to_count, Handle to_type, Handle comm) {
  return MPI_Allgather(from, count, (MPI_Datatype)type, to, to_count, (MPI_Datatype)to_type, (MPI_Comm)comm);
}

/* The ABI's status has fields of its own, which nobody fills here. JAX ignores it. */
static void check_ignored(void *status) {
  if (status != MPI_STATUS_IGNORE) missing("MPI with a status");
}
int MPIABI_Sendrecv(const void *from, int count, Handle type, int target, int tag, void *to, int to_count,
                    Handle to_type, int source, int to_tag, Handle comm, void *status) {
  check_ignored(status);
  return MPI_Sendrecv(from, count, (MPI_Datatype)type, target, tag, to, to_count, (MPI_Datatype)to_type, source,
                      to_tag, (MPI_Comm)comm, MPI_STATUS_IGNORE);
}
int MPIABI_Isend(const void *from, int count, Handle type, int target, int tag, Handle comm, Handle *request) {
  MPI_Request made;
  int code = MPI_Isend(from, count, (MPI_Datatype)type, target, tag, (MPI_Comm)comm, &made);
  *request = (Handle)made;
  return code;
}
int MPIABI_Irecv(void *to, int count, Handle type, int source, int tag, Handle comm, Handle *request) {
  MPI_Request made;
  int code = MPI_Irecv(to, count, (MPI_Datatype)type, source, tag, (MPI_Comm)comm, &made);
  *request = (Handle)made;
  return code;
}
int MPIABI_Wait(Handle *request, void *status) {
  check_ignored(status);
  MPI_Request awaited = (MPI_Request)*request;
  int code = MPI_Wait(&awaited, MPI_STATUS_IGNORE);
  *request = (Handle)awaited;
  return code;
}
