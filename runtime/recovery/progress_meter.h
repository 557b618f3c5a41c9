#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include <resilient/clock.h>

namespace resilient::recovery {

// A thread of the program whose line says whether what it computes is progress. Thread: value type.
struct WatchedThread {
  int id = 0;
  std::uint64_t frame = 0;  // The same for the same stack; 0: not known.
  double cpu_seconds = 0;   // What it has of ProgressSample::cpu_seconds.
};

// What can be seen of a process from outside at one moment. Thread: value type.
struct ProgressSample {
  Instant now{};
  double cpu_seconds = 0;        // Of the process and its children, without our own threads.
  std::uint64_t call_bytes = 0;  // Read and written by calls.
  std::uint64_t disk_bytes = 0;  // Of storage, also through mapped files.
  std::uint64_t operations = 0;  // That the process was asked for.
  // The main thread, and the one that others are told of; empty: not known.
  std::vector<WatchedThread> threads;
};

inline constexpr Duration kProgressWindow = std::chrono::seconds(60);
// Samples come every kSampleEvery while somebody asks. Where none came for so long, the process was
// suspended or nobody asked: what had been seen before says nothing.
inline constexpr Duration kSampleEvery = std::chrono::seconds(5);
inline constexpr Duration kSamplesStale = 3 * kSampleEvery;
// Less than that in a window may be the process's own housekeeping.
inline constexpr double kProgressShareOfCore = 0.05;
inline constexpr std::uint64_t kProgressBytes = 1 << 20;

// Since when a process has made no progress.
//
// Progress is a new operation, another frame of a thread that is watched, another choice of these
// threads, or in some part of the last kProgressWindow kProgressShareOfCore of a core, or
// kProgressBytes of input or output. What a watched thread computes counts only while its frame is
// not known, as in a program without an interpreter: one that stays at one line may spin in one
// call into a driver, as a cudaStreamSynchronize does behind a kernel that never ends. A frame that
// cannot be read is the one that was read last: some call has the interpreter's lock. What other
// threads and children compute counts whatever the watched ones do.
//
// Owner: the observer. Thread: caller-synchronised. Pure: time arrives in the samples.
class ProgressMeter {
 public:
  void Take(const ProgressSample& sample);

  // At the latest sample; zero before the first.
  Duration no_progress() const { return no_progress_; }

 private:
  // Sums since the first sample. They never shrink: a child that ends may take its time with it.
  struct Mark {
    Instant when{};
    double cpu_seconds = 0;
    std::uint64_t call_bytes = 0;
    std::uint64_t disk_bytes = 0;
  };

  void Restart(const ProgressSample& sample);
  void AddUp(const ProgressSample& sample);
  bool HasNewWork(const ProgressSample& sample);
  bool NoteFrames(const std::vector<WatchedThread>& threads);
  double SpunSince(const ProgressSample& sample) const;
  bool HasEnoughUse() const;

  bool started_ = false;
  ProgressSample last_;
  std::map<int, std::uint64_t> frames_;  // The latest that was known of each watched thread.
  Mark sum_;
  std::deque<Mark> window_;  // Since progress was seen, at most kProgressWindow, one a second.
  Instant progress_at_{};
  Duration no_progress_{};
};

// When the next sample is due: kNever when nobody has asked for long.
Instant NextSample(Instant last_sample, Instant last_asked, Duration every);

}  // namespace resilient::recovery
