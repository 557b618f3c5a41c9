#include "runtime/recovery/host_watch.h"

#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/shm_segment.h"

namespace resilient::recovery {
namespace {

// The kernel wakes one watcher of a token; when that one is stopped or dies itself, the others find
// out by themselves.
constexpr Duration kLookInterval = Millis(250);
// While the holder of a token is dead and its process does not show it yet.
constexpr Duration kLookAgainInterval = Millis(5);

}  // namespace

HostWatch::HostWatch(bool enabled, OnDeath on_death, const Clock& clock, FutexSupport support)
    : enabled_(enabled), on_death_(std::move(on_death)), clock_(clock), support_(support) {}

HostWatch::~HostWatch() { Close(); }

SessionEndpoint HostWatch::Offer(std::string communicator) {
  own_.communicator = std::move(communicator);
  if (!enabled_ || std::exchange(offered_, true)) return own_;
  std::string host_id = ShortHostId(ShmHostId());
  if (host_id.empty()) return own_;
  Result<std::unique_ptr<RobustToken>> token = RobustToken::Create();
  if (!token.ok()) {
    RESILIENT_LOG(kDebug, "the other ranks of this host cannot see this one's end at once: ",
                  token.status().message());
    return own_;
  }
  token_ = std::move(token).value();
  token_->Take();
  own_.token = RobustToken::EncodeOffer(token_->offer());
  own_.host_id = std::move(host_id);
  return own_;
}

void HostWatch::Follow(const View& view, int rank) {
  std::vector<Neighbour> neighbours = NeighboursOf(view, rank, own_);
  std::lock_guard lock(mutex_);
  if (closing_ || (neighbours.empty() && !thread_.Joinable())) return;
  wanted_ = std::move(neighbours);
  wanted_changed_ = true;
  __atomic_fetch_add(&changes_, 1, __ATOMIC_RELEASE);
  FutexWake(&changes_, 1);
  if (!thread_.Joinable()) thread_ = Thread("res-watch", [this] { Run(); });
}

void HostWatch::LetGo() {
  if (token_ != nullptr) token_->LetGo();
}

void HostWatch::Close() {
  Thread thread;
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    __atomic_fetch_add(&changes_, 1, __ATOMIC_RELEASE);
    FutexWake(&changes_, 1);
    thread = std::move(thread_);
  }
  thread.Join();
}

void HostWatch::Run() {
  for (;;) {
    // Read before what it counts is looked at: a change after that ends the sleep.
    const std::uint32_t changes_seen = __atomic_load_n(&changes_, __ATOMIC_ACQUIRE);
    std::vector<Neighbour> wanted;
    bool changed = false;
    {
      std::lock_guard lock(mutex_);
      if (closing_) return;
      changed = std::exchange(wanted_changed_, false);
      if (changed) wanted = wanted_;
    }
    if (changed) Adopt(std::move(wanted));
    Look(clock_.Now());
    Sleep(changes_seen);
  }
}

void HostWatch::Adopt(std::vector<Neighbour> neighbours) {
  // A view that was on its way may still have whose death was told.
  const auto told = [this](const Neighbour& neighbour) {
    return std::find(told_.begin(), told_.end(), neighbour) != told_.end();
  };
  std::erase_if(told_, [&neighbours](const Neighbour& dead) {
    return std::find(neighbours.begin(), neighbours.end(), dead) == neighbours.end();
  });
  std::vector<Watched> before = std::move(watched_);
  watched_.clear();
  watched_.reserve(neighbours.size());
  for (Neighbour& neighbour : neighbours) {
    if (told(neighbour)) continue;
    const auto known = std::find_if(before.begin(), before.end(), [&](const Watched& watched) {
      return watched.neighbour == neighbour;
    });
    if (known != before.end()) {
      watched_.push_back(std::move(*known));
      before.erase(known);
      continue;
    }
    Result<std::unique_ptr<TokenWatch>> token = TokenWatch::Attach(neighbour.token);
    if (!token.ok()) {
      // Perhaps because it was killed since it joined. Should it have left since, the server knows.
      const ProcessEnd end = EndOf(neighbour.token.pid, neighbour.token.start_time);
      if (end.ending) {
        TellDeath(std::move(neighbour), end);
        continue;
      }
      RESILIENT_LOG(kDebug, "the end of rank ", neighbour.rank,
                    " is known by other evidence: ", token.status().message());
      continue;
    }
    watched_.push_back({std::move(neighbour), std::move(token).value()});
  }
}

void HostWatch::TellDeath(Neighbour neighbour, const ProcessEnd& end) {
  on_death_(neighbour, end);
  told_.push_back(std::move(neighbour));
}

void HostWatch::Look(Instant now) {
  for (auto watched = watched_.begin(); watched != watched_.end();) {
    const std::uint32_t word = __atomic_load_n(watched->token->word(), __ATOMIC_ACQUIRE);
    ProcessEnd end;
    if (TokenWatch::HolderDied(word)) {
      if (watched->died == Instant::max()) watched->token->WakeOtherWatchers();
      watched->died = std::min(watched->died, now);
      end = watched->token->OwnerEnd();
    }
    switch (Judge(word, end.ending, now - std::min(watched->died, now))) {
      case TokenVerdict::kWatch:
      case TokenVerdict::kLookAgain:
        ++watched;
        continue;
      case TokenVerdict::kDied:
        TellDeath(std::move(watched->neighbour), end);
        break;
      case TokenVerdict::kForget:
        RESILIENT_LOG(kDebug, "rank ", watched->neighbour.rank, " (pid ",
                      watched->neighbour.token.pid, ") is not watched any more: it ",
                      TokenWatch::HolderDied(word) ? "lost its control thread and goes on without"
                                                   : "let go of its token");
        break;
    }
    watched = watched_.erase(watched);
  }
}

void HostWatch::Sleep(std::uint32_t changes_seen) {
  std::vector<FutexWord> words;
  words.reserve(watched_.size() + 1);
  words.push_back({&changes_, changes_seen});
  Duration most = watched_.empty() ? Duration(std::chrono::hours(1)) : kLookInterval;
  for (const Watched& watched : watched_) {
    // As it is now: had it changed since Look, the wait would begin with what nobody looked at.
    const std::uint32_t word = __atomic_load_n(watched.token->word(), __ATOMIC_ACQUIRE);
    if (TokenWatch::Held(word)) {
      words.push_back({watched.token->word(), word});
    } else {
      most = std::min(most, kLookAgainInterval);
    }
  }
  FutexWaitAny(words, most, support_);
}

}  // namespace resilient::recovery
