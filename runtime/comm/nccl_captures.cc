#include "runtime/comm/nccl_captures.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "runtime/base/log.h"

namespace resilient {

class HeldGraph {
 public:
  explicit HeldGraph(std::shared_ptr<const Doorbell> doorbell) : doorbell_(std::move(doorbell)) {}
  bool is_gone() const { return is_gone_.load(std::memory_order_acquire); }

  // What CUDA destroys with the graph: `held`, a shared_ptr to one of these.
  static void OnGone(void* held) {
    const std::unique_ptr<std::shared_ptr<HeldGraph>> graph(
        static_cast<std::shared_ptr<HeldGraph>*>(held));
    (*graph)->is_gone_.store(true, std::memory_order_release);
    (*graph)->doorbell_->Ring();
  }

 private:
  const std::shared_ptr<const Doorbell> doorbell_;
  std::atomic<bool> is_gone_{false};
};

bool CanCapture(const CudaApi& cuda) {
  return cuda.EventElapsedTime != nullptr && cuda.EventRecordWithFlags != nullptr &&
         cuda.GraphRetainUserObject != nullptr && cuda.StreamGetCaptureInfo != nullptr &&
         cuda.StreamIsCapturing != nullptr && cuda.ThreadExchangeStreamCaptureMode != nullptr &&
         cuda.UserObjectCreate != nullptr && cuda.UserObjectRelease != nullptr;
}

CudaResult CaptureOf(const CudaApi& cuda, CudaStreamHandle stream, std::uint64_t* capture) {
  *capture = 0;
  if (cuda.StreamIsCapturing == nullptr) return CudaResult::kSuccess;
  int capturing = 0;
  CudaResult result = cuda.StreamIsCapturing(stream, &capturing);
  if (result != CudaResult::kSuccess || capturing == 0) return result;
  unsigned long long id = 0;
  if (cuda.StreamGetCaptureInfo != nullptr)
    result = cuda.StreamGetCaptureInfo(stream, &capturing, &id, nullptr, nullptr, nullptr, nullptr);
  *capture = std::max(id, 1ULL);
  return result;
}

NcclCaptures::NcclCaptures(const CudaApi& cuda, bool is_high_priority,
                           std::shared_ptr<NcclEvents> pool, std::shared_ptr<NcclEvents> timed,
                           std::shared_ptr<const Doorbell> doorbell)
    : cuda_(cuda),
      is_high_priority_(is_high_priority),
      pool_(std::move(pool)),
      timed_(std::move(timed)),
      doorbell_(std::move(doorbell)) {}

NcclCaptures::~NcclCaptures() = default;

Status NcclCaptures::Begin(std::vector<SubmittedOp>& ops, CudaStreamHandle outside) {
  RESILIENT_RETURN_IF_ERROR(Prepare(ops, outside));
  launching_ = std::move(ops);
  return Status::Ok();
}

Status NcclCaptures::Prepare(std::vector<SubmittedOp>& ops, CudaStreamHandle outside) {
  const SubmittedOp& first = ops.front();
  const auto failed = [&](CudaResult result, std::string_view what) {
    return CaptureStatus(cuda_, result, what, StrCat(Describe(first.op), " in a capture"), {});
  };
  if (remembered_.size() + ops.size() > kMaxOperations)
    return Status(StatusCode::kResourceExhausted,
                  StrCat(Describe(first.op), " cannot be captured: graphs that are alive have ",
                         remembered_.size(), " operations of its group, and ", kMaxOperations,
                         " are the most"));
  if (!captured_.empty() && captured_.front().op.capture != first.capture)
    return Status(StatusCode::kUnimplemented,
                  StrCat(Describe(first.op),
                         " cannot be captured: another capture with operations of its group is "
                         "under way; capture one graph after the other"));
  CudaResult result = CudaResult::kSuccess;
  if (stream_ == nullptr) result = MakeStream(cuda_, is_high_priority_, &stream_);
  if (result != CudaResult::kSuccess) return failed(result, "cudaStreamCreate");
  result = MarkOrigin(outside);
  if (result != CudaResult::kSuccess) return failed(result, "cudaEventRecordWithFlags");
  Remembered one;
  result = timed_->Take(&one.begin);
  if (result == CudaResult::kSuccess) result = pool_->Take(&one.end);
  if (result != CudaResult::kSuccess) return failed(result, "cudaEventCreate");
  // From here on the stream is part of the capture.
  for (const SubmittedOp& op : ops) {
    result = cuda_.StreamWaitEvent(stream_, HandleOf(op.ready), 0);
    if (result != CudaResult::kSuccess) return failed(result, "cudaStreamWaitEvent");
  }
  one.capture = first.capture;
  result = HoldGraph(first.capture, &one.graph);
  if (result != CudaResult::kSuccess) return failed(result, "cudaGraphRetainUserObject");
  one.op.op = OutlineOf(first.op);
  one.op.op.call_site = first.op.call_site;
  one.op.op.timeout = first.op.timeout;
  one.op.op.stall = first.op.stall;
  one.op.seq = first.seq;
  result = cuda_.EventRecordWithFlags(HandleOf(one.begin), stream_, kCudaEventRecordExternal);
  if (result != CudaResult::kSuccess) return failed(result, "cudaEventRecordWithFlags");
  one.number = ++count_;
  one.place = PlaceOf(ops);
  remembered_.push_back(std::move(one));
  return Status::Ok();
}

// Numbers them, so that the ranks which take part count alike.
ReplayPlace NcclCaptures::PlaceOf(const std::vector<SubmittedOp>& ops) {
  ReplayPlace place;
  for (const SubmittedOp& op : ops) {
    if (!IsPointToPoint(op.op.kind)) {
      place.collective = ++last_.collective;
      continue;
    }
    const bool sends = op.op.kind == OpKind::kSend;
    ReplayPlace::Messages& last = last_.messages[op.op.peer];
    ReplayPlace::Messages& here = place.messages[op.op.peer];
    const std::uint64_t number = ++(sends ? last.sends : last.recvs).last;
    (sends ? here.sends : here.recvs).Add(number);
  }
  return place;
}

CudaResult NcclCaptures::MarkOrigin(CudaStreamHandle outside) {
  if (origin_ != nullptr) return CudaResult::kSuccess;
  const CudaResult taken = timed_->Take(&origin_);
  if (taken != CudaResult::kSuccess) return taken;
  const CudaResult marked =
      cuda_.EventRecordWithFlags(HandleOf(origin_), outside, kCudaEventRecordDefault);
  if (marked != CudaResult::kSuccess) origin_.reset();
  return marked;
}

// One object for all operations of a capture.
CudaResult NcclCaptures::HoldGraph(std::uint64_t capture,
                                   std::shared_ptr<const HeldGraph>* held) const {
  if (!remembered_.empty() && remembered_.back().capture == capture &&
      !remembered_.back().graph->is_gone()) {
    *held = remembered_.back().graph;
    return CudaResult::kSuccess;
  }
  int capturing = 0;
  unsigned long long id = 0;
  CudaGraphHandle graph = nullptr;
  const CudaResult asked =
      cuda_.StreamGetCaptureInfo(stream_, &capturing, &id, &graph, nullptr, nullptr, nullptr);
  if (asked != CudaResult::kSuccess) return asked;
  auto made = std::make_shared<HeldGraph>(doorbell_);
  auto owned = std::make_unique<std::shared_ptr<HeldGraph>>(made);
  CudaUserObjectHandle object = nullptr;
  const CudaResult created = cuda_.UserObjectCreate(&object, owned.get(), &HeldGraph::OnGone, 1,
                                                    kCudaUserObjectNoDestructorSync);
  if (created != CudaResult::kSuccess) return created;
  (void)owned.release();  // OnGone deletes it.
  const CudaResult retained =
      cuda_.GraphRetainUserObject(graph, object, 1, kCudaGraphUserObjectMove);
  if (retained != CudaResult::kSuccess) {
    (void)cuda_.UserObjectRelease(object, 1);
    return retained;
  }
  *held = std::move(made);
  return CudaResult::kSuccess;
}

CudaResult NcclCaptures::OnLaunched(const LaunchMark::Joiner& joiner, std::string_view where,
                                    FinishedOps& finished) {
  CudaResult result = cuda_.EventRecordWithFlags(HandleOf(remembered_.back().end), stream_,
                                                 kCudaEventRecordExternal);
  remembered_.back().is_launched = result == CudaResult::kSuccess;
  for (SubmittedOp& op : launching_) {
    Captured one{.op = std::move(op), .joined = nullptr};
    if (result == CudaResult::kSuccess) result = pool_->Mark(stream_, &one.joined);
    if (result == CudaResult::kSuccess && one.op.op.mark != nullptr)
      one.op.op.mark->Launch(joiner, one.joined.get());
    if (IsOfCapture(result)) {
      finished.Add(std::move(one.op), CaptureStatus(cuda_, result, "a capture", where, {}));
    } else {
      captured_.push_back(std::move(one));
    }
  }
  launching_.clear();
  return IsOfCapture(result) ? CudaResult::kSuccess : result;
}

CudaResult NcclCaptures::AskWhetherItIsOver(bool* is_over) const {
  std::uint64_t capture = 0;
  const CudaResult asked = CaptureOf(cuda_, stream_, &capture);
  *is_over = IsOfCapture(asked) || capture != captured_.front().op.capture;
  return IsOfCapture(asked) ? CudaResult::kSuccess : asked;
}

CudaResult NcclCaptures::Sweep(FinishedOps& finished) {
  if (!launching_.empty()) return CudaResult::kSuccess;
  bool is_over = false;
  if (!captured_.empty()) {
    const CudaResult asked = AskWhetherItIsOver(&is_over);
    if (asked != CudaResult::kSuccess) return asked;
  }
  if (is_over) {
    for (Captured& one : std::exchange(captured_, {})) {
      std::shared_ptr<Completion> kept;
      if (hold_ == nullptr) kept = hold_ = std::make_shared<Completion>();
      finished.Add(std::move(one.op), Status::Ok(), std::move(kept));
    }
  }
  std::erase_if(remembered_, [](const Remembered& one) { return one.graph->is_gone(); });
  return CudaResult::kSuccess;
}

void NcclCaptures::EndAll(const Status& status, FinishedOps& finished) {
  for (Captured& one : std::exchange(captured_, {})) finished.Add(std::move(one.op), status);
  for (SubmittedOp& op : std::exchange(launching_, {})) finished.Add(std::move(op), status);
}

CudaResult NcclCaptures::Look(Instant now) {
  const bool was_inside = std::exchange(is_inside_, false);
  for (const Remembered& one : remembered_) {
    if (!one.is_launched) continue;
    CudaResult result = cuda_.EventQuery(HandleOf(one.end));
    if (result == CudaResult::kSuccess) continue;
    if (result != CudaResult::kNotReady) return result;
    result = cuda_.EventQuery(HandleOf(one.begin));
    if (result == CudaResult::kNotReady) continue;
    if (result != CudaResult::kSuccess) return result;
    float began = 0;
    result = cuda_.EventElapsedTime(&began, HandleOf(origin_), HandleOf(one.begin));
    if (result == CudaResult::kNotReady) continue;  // Launched again by now.
    if (result != CudaResult::kSuccess) return result;
    is_inside_ = true;
    if (was_inside && replay_.number == one.number && replay_began_ == began) break;
    replay_began_ = began;
    replay_.number = one.number;
    replay_.place = one.place;
    replay_.since = now;
    replay_.op = {};
    replay_.op.op = one.op.op;
    replay_.op.seq = one.op.seq;
    replay_.op.submitted = now;
    replay_.op.timeouts = OpTimeouts(one.op.op, now);
    break;
  }
  return CudaResult::kSuccess;
}

std::size_t NcclCaptures::graphs() const {
  std::size_t count = 0;
  const HeldGraph* last = nullptr;
  for (const Remembered& one : remembered_) {
    if (one.graph->is_gone() || one.graph.get() == last) continue;
    last = one.graph.get();
    ++count;
  }
  return count;
}

bool NcclCaptures::IsIdle() const {
  return std::none_of(remembered_.begin(), remembered_.end(), [this](const Remembered& one) {
    return one.is_launched && !one.graph->is_gone() &&
           cuda_.EventQuery(HandleOf(one.end)) == CudaResult::kNotReady;
  });
}

std::shared_ptr<void> NcclCaptures::Keep() {
  using Kept = std::pair<std::vector<Remembered>, std::shared_ptr<Completion>>;
  return std::make_shared<Kept>(std::move(remembered_), std::move(hold_));
}

}  // namespace resilient
