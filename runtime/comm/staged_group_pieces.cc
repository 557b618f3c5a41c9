#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/staged_group.h"

// How the operation that is under way goes through memory of the host, piece by piece.
namespace resilient {
namespace {

// After something was put into the device's queue the thread does not sleep for this long: small
// copies take less than a sleep's granularity.
constexpr Duration kSpin = std::chrono::microseconds(50);

// What the ranks tell each other of their largest parts: of a type and length of which no program
// gathers anything, so that a rank in another operation is found.
constexpr DataType kSizesType = DataType::kFloat8E5M2;
constexpr std::size_t kSizesBytes = 11;

}  // namespace

// False: the group has ended.
bool StagedGroup::Move(Transfer& transfer) {
  if (!AskSizes(transfer)) return false;
  if (transfer.plan.MustAsk() && (!transfer.asked || transfer.sizes != nullptr)) return true;
  return PlacePieces(transfer) && BeginPieces(transfer) && SubmitPieces(transfer);
}

bool StagedGroup::AskSizes(Transfer& transfer) {
  if (!transfer.plan.MustAsk() || (transfer.asked && transfer.sizes == nullptr)) return true;
  const auto ranks = static_cast<std::size_t>(port_->size());
  if (!transfer.asked) {
    transfer.asked = true;
    transfer.sizes = std::make_unique<Sizes>();
    Sizes& sizes = *transfer.sizes;
    sizes.said.resize(kSizesBytes);
    sizes.heard.resize(kSizesBytes * ranks);
    const auto largest = static_cast<std::uint64_t>(transfer.plan.largest());
    std::memcpy(sizes.said.data(), &largest, sizeof largest);
    sizes.outcome = std::make_shared<Outcome>();
    Operation op;
    op.kind = OpKind::kAllGather;
    op.dtype = kSizesType;
    op.data = sizes.said.data();
    op.count = kSizesBytes;
    for (std::size_t rank = 0; rank < ranks; ++rank)
      op.outputs.push_back({.data = &sizes.heard[rank * kSizesBytes], .count = kSizesBytes});
    if (!SubmitToHost(transfer, std::move(op), sizes.outcome, &sizes.number, 0)) return false;
  }
  const Sizes& sizes = *transfer.sizes;
  if (!sizes.outcome->over.load(std::memory_order_acquire)) return true;
  if (!sizes.outcome->status.ok()) {
    End(sizes.outcome->status);
    return false;
  }
  std::uint64_t largest = 0;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    std::uint64_t of_rank = 0;
    std::memcpy(&of_rank, &sizes.heard[rank * kSizesBytes], sizeof of_rank);
    largest = std::max(largest, of_rank);
  }
  transfer.plan.SetLargest(static_cast<std::size_t>(largest));
  ForgetPiece(transfer, sizes.number);
  transfer.sizes.reset();
  return true;
}

// A message is received behind those before it with the same tag: so its pieces come behind theirs.
bool StagedGroup::IsBehindAnother(const Transfer& transfer) const {
  for (const auto& other : head_) {
    if (other.get() == &transfer) return false;
    const Operation& theirs = other->op.op;
    const Operation& ours = transfer.op.op;
    if (theirs.kind != ours.kind || theirs.peer != ours.peer || theirs.tag != ours.tag) continue;
    const bool submitted =
        other->begun == other->plan.pieces() &&
        (other->pieces.empty() || other->pieces.back().stage != Piece::Stage::kCopying);
    if (!submitted) return true;
  }
  return false;
}

bool StagedGroup::BeginPieces(Transfer& transfer) {
  const std::size_t bytes = transfer.plan.BufferBytes();
  while (transfer.begun < transfer.plan.pieces()) {
    if (transfer.begun == 0 && IsBehindAnother(transfer)) return true;
    // Each message of a batch must be able to move, whatever the others wait for.
    const bool beyond = head_.size() > 1 && transfer.pieces.empty();
    if (transfer.pieces.size() >= kPieces || (memory_->taken() >= kPieces && !beyond)) return true;
    Piece piece;
    if (bytes > 0) {
      piece.buffer = memory_->Take(bytes);
      if (piece.buffer == nullptr) return !Failed(memory_->result(), "cudaHostAlloc");
    }
    piece.work = transfer.plan.Piece(transfer.begun, piece.buffer);
    ++transfer.begun;
    transfer.pieces.push_back(std::move(piece));
    if (!CopyOut(transfer, transfer.pieces.back())) return false;
  }
  return true;
}

bool StagedGroup::CopyOut(Transfer& transfer, Piece& piece) {
  // A barrier is entered when what its caller's stream had has ended.
  if (piece.work.out.empty() && transfer.op.op.kind != OpKind::kBarrier) return true;
  return Copy(piece.work.out, CudaCopy::kDeviceToHost, piece.copied);
}

// The event is there before the first copy: whatever fails behind that, the release has it to wait
// for what is in the stream.
bool StagedGroup::Copy(const std::vector<StagedCopy>& copies, CudaCopy direction, Mark& mark) {
  const bool out = direction == CudaCopy::kDeviceToHost;
  const CudaStreamHandle stream = out ? out_ : in_;
  if (Failed(context_.pool->Take(&mark.event), "cudaEventCreate")) return false;
  for (const StagedCopy& one : copies) {
    void* to = out ? one.host : one.device;
    const void* from = out ? one.device : one.host;
    if (Failed(cuda_.MemcpyAsync(to, from, one.bytes, direction, stream), "cudaMemcpyAsync"))
      return false;
  }
  if (Failed(context_.pool->Record(mark.event, stream), "cudaEventRecord")) return false;
  mark.recorded = true;
  spin_until_ = context_.now + kSpin;
  return true;
}

// In their order: the CPU transport runs them in it.
bool StagedGroup::SubmitPieces(Transfer& transfer) {
  const std::size_t first = transfer.begun - transfer.pieces.size();
  for (std::size_t i = 0; i < transfer.pieces.size(); ++i) {
    Piece& piece = transfer.pieces[i];
    if (piece.stage != Piece::Stage::kCopying) continue;
    if (piece.copied.event != nullptr) {
      const CudaResult copied = cuda_.EventQuery(HandleOf(piece.copied.event));
      if (copied == CudaResult::kNotReady) return true;
      if (Failed(copied, "work on the device")) return false;
      piece.copied = {};
    }
    piece.stage = Piece::Stage::kRunning;
    piece.outcome = std::make_shared<Outcome>();
    if (!SubmitToHost(transfer, std::move(piece.work.op), piece.outcome, &piece.number, first + i))
      return false;
  }
  return true;
}

bool StagedGroup::SubmitToHost(const Transfer& transfer, Operation op,
                               std::shared_ptr<Outcome> outcome, std::uint64_t* number,
                               std::size_t piece) {
  const SubmittedOp& whole = transfer.op;
  op.call_site = CallSiteOf(transfer, op, piece);
  op.stall = whole.op.stall;
  if (whole.op.timeout > Duration::zero()) {
    // What is left of it, but for a difference that would only make the texts strange.
    const Duration left = whole.submitted + whole.op.timeout - context_.now;
    const bool nearly_all = left > whole.op.timeout - whole.op.timeout / 100;
    op.timeout = nearly_all ? whole.op.timeout : std::max<Duration>(left, Millis(1));
  }
  const bool message = IsPointToPoint(op.kind);
  const auto submitted = host_->Submit(
      std::move(op),
      [outcome = std::move(outcome), doorbell = context_.doorbell](const Status& status) {
        outcome->status = status;
        outcome->over.store(true, std::memory_order_release);
        doorbell->Ring();
      });
  if (!submitted.ok()) {
    End(submitted.status());
    return false;
  }
  *number = *submitted;
  (message ? messages_ : collectives_) = *submitted;
  calls_->Begin(spec_.name, spec_.generation, message, *submitted, transfer.call);
  return true;
}

// Where a piece is not all of its operation, or has another number, says so.
std::string StagedGroup::CallSiteOf(const Transfer& transfer, const Operation& op,
                                    std::size_t piece) const {
  const SubmittedOp& whole = transfer.op;
  const std::uint64_t number = (IsPointToPoint(op.kind) ? messages_ : collectives_) + 1;
  const bool sizes = transfer.sizes != nullptr;
  const std::size_t pieces = transfer.plan.pieces();
  if (!sizes && pieces == 1 && number == whole.seq) return whole.op.call_site;
  std::string text = sizes        ? "the sizes of "
                     : pieces > 1 ? StrCat("piece ", piece + 1, " of ", pieces, " of ")
                                  : std::string();
  text += StrCat(transfer.call->what, " #", whole.seq);
  return whole.op.call_site.empty() ? text : StrCat(whole.op.call_site, " (", text, ")");
}

void StagedGroup::ForgetPiece(const Transfer& transfer, std::uint64_t number) {
  const bool message = IsPointToPoint(transfer.op.op.kind);
  if (number != 0) calls_->End(spec_.name, spec_.generation, message, number);
}

bool StagedGroup::PlacePieces(Transfer& transfer) {
  for (Piece& piece : transfer.pieces) {
    if (piece.stage == Piece::Stage::kPlacing) continue;
    if (piece.stage == Piece::Stage::kCopying ||
        !piece.outcome->over.load(std::memory_order_acquire))
      break;
    if (!piece.outcome->status.ok()) {
      // The CPU transport has told the session, and the peers.
      End(piece.outcome->status);
      return false;
    }
    ForgetPiece(transfer, piece.number);
    if (!Place(piece)) return false;
  }
  while (!transfer.pieces.empty() && transfer.pieces.front().stage == Piece::Stage::kPlacing) {
    Piece& first = transfer.pieces.front();
    if (first.placed.event != nullptr) {
      const CudaResult placed = cuda_.EventQuery(HandleOf(first.placed.event));
      if (placed == CudaResult::kNotReady) break;
      if (Failed(placed, "work on the device")) return false;
    }
    if (first.buffer != nullptr) memory_->Give(first.buffer);
    transfer.pieces.pop_front();
  }
  return true;
}

bool StagedGroup::Place(Piece& piece) {
  piece.stage = Piece::Stage::kPlacing;
  if (piece.work.in.empty()) return true;
  return Copy(piece.work.in, CudaCopy::kHostToDevice, piece.placed);
}

bool StagedGroup::IsThrough(const Transfer& transfer) const {
  const bool begun = transfer.sizes == nullptr && transfer.begun == transfer.plan.pieces();
  return begun &&
         std::all_of(transfer.pieces.begin(), transfer.pieces.end(),
                     [](const Piece& piece) { return piece.stage == Piece::Stage::kPlacing; });
}

bool StagedGroup::RunsOnHost(const Transfer& transfer) {
  return transfer.sizes != nullptr ||
         std::any_of(transfer.pieces.begin(), transfer.pieces.end(),
                     [](const Piece& piece) { return piece.stage == Piece::Stage::kRunning; });
}

// What is copied from the device from now on is what this operation has left there.
bool StagedGroup::Launch(Transfer& transfer) {
  if (Failed(context_.pool->Mark(in_, &transfer.end), "cudaEventRecord")) return false;
  if (Failed(cuda_.StreamWaitEvent(out_, HandleOf(transfer.end), 0), "cudaStreamWaitEvent"))
    return false;
  spin_until_ = context_.now + kSpin;
  if (transfer.op.op.mark != nullptr)
    transfer.op.op.mark->Launch(context_.joiner, transfer.end.get());
  return true;
}

}  // namespace resilient
