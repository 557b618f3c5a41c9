#pragma once

// What libresilient_fake_nccl.so has besides the functions of NCCL and of the CUDA runtime that
// nccl_api.h names: some more of the CUDA runtime, and the test's side of its one fake. C, for
// dlsym. Thread: thread-safe.
extern "C" {

// Changes what goes wrong for the ranks of this process: members of NcclScript with their numbers,
// as in "hang_abort=1 async_error=6". 0, or 1 when a name is unknown or a number is none; then
// nothing has changed. The first script is the variable RESILIENT_FAKE_NCCL_SCRIPT.
int resilient_fake_change(const char* script);

// NcclCounts of this process as one JSON object. Valid until the thread's next call.
const char* resilient_fake_counts();

// Waits until the number of that name in the counts is at least this (of kernels_begun: of all
// ranks of the process; misuse: how many). 0; 1 when it is not within half a minute; 2 when the
// name is unknown.
int resilient_fake_wait(const char* name, int at_least);
}
