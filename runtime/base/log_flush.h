#pragma once

#include <string>

#include <resilient/clock.h>

namespace resilient {

// What is no line of the log, such as the last words of a command; it takes the same way. `text`
// ends with a newline.
void WriteToStderr(std::string text);

// How long the end of a process waits for a reader of its last lines.
inline constexpr Duration kLogExitPatience = std::chrono::milliseconds(500);
// Waits until stderr has taken all lines; false when the patience ends first. std::exit does it;
// for a process that ends otherwise (_exit, a signal to itself), and for tests. Not for a thread
// that others rely on, unless it ends the process next.
bool FlushLog(Duration patience = kLogExitPatience);

}  // namespace resilient
