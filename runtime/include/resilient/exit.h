#pragma once

#include <string_view>

#include <resilient/clock.h>

namespace resilient {

// Exit code of a process that could not end by itself: a call into a driver did not return.
inline constexpr int kBlockedExitCode = 86;

// A call into a driver that never returns (the abort of a communicator whose kernel spins) holds
// locks that whatever the program or the driver does at exit waits for. So that this is no way to
// hang for ever, a process that is ending, and in which such a call has not returned for the whole
// budget since, is ended with kBlockedExitCode and one line that names the call. A process that is
// not ending is left alone, and so is one that takes its time where all calls return.
//
// The functions are process-wide, as an exit is, and thread-safe. A forked child begins anew: its
// exit has not begun, and no call is under way in it.

// The budget of the process, from now on: the session's (Ladder::budget). std::exit counts as its
// beginning.
void SetExitBudget(Duration budget);

// The process is ending, for those who know before std::exit: an interpreter first takes its
// modules down. The first call counts.
void ExitBegins();
// Ends the process now with kBlockedExitCode: it cannot end by itself, by `why`, which the line in
// the log says. For a main thread that waits in a driver for what never comes.
[[noreturn]] void EndProcess(std::string_view why);
// For the texts of what is refused by then.
bool ExitHasBegun();

}  // namespace resilient
