#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "runtime/comm/collective.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/reduce_stream.h"
#include "runtime/comm/schedule.h"

// The collectives that combine data inside each host first, and then across hosts.

namespace resilient {
namespace {

// What is passed on at a time where all ranks know the count. A part that is only known to those
// who exchange it goes in one message, whose header says how long it is.
constexpr std::size_t kSegmentBytes = 512u << 10;

// A reduction of what all ranks give, in pieces. Three stages, each of which works on the pieces
// in a fixed order and waits for earlier stages only:
//   inputs    go to the owner of each piece in their host, which combines them
//   partials  go from there to the home of each piece, which combines them
//   results   of an all_reduce go from the home to the owner in each other host, and from the
//             owners to the others in their host
// On a link that carries partials as well as results, the partials are first.
//
// All hear of all by notes, so whoever is in another operation is found, and whoever waits when
// nothing moves knows that all have entered. In a reduce one rank, the hub, is enough for both: the
// root, whom all wait for.
class HierarchicalReduction final : public Collective {
 public:
  HierarchicalReduction(const Operation& op, int rank, const HostLayout& layout,
                        CollectiveHost& host)
      : Collective(host, rank, static_cast<int>(layout.host_of.size())),
        op_(op),
        layout_(layout),
        host_index_(layout.host_of[static_cast<std::size_t>(rank)]),
        hosts_(static_cast<int>(layout.hosts.size())),
        element_(SizeOf(op.dtype)),
        partial_element_(SizeOf(PartialTypeOf(op.dtype, op.reduce))),
        incoming_(layout.host_of.size()),
        results_(layout.host_of.size()),
        partials_left_(layout.host_of.size()),
        results_sent_(layout.hosts.size()) {
    MakePieces();
  }

  // The windows of both streams, then the partials.
  std::size_t ScratchBytes() const override {
    return WithinBytes() + AcrossBytes() + CountOf(owned_) * partial_element_;
  }
  void Start(std::span<std::byte> scratch) override {
    ExpectAll();
    MakeStreams(scratch);
    SendNotes();
    for (const Piece& piece : pieces_) {
      if (piece.owner != rank()) Send(piece.owner, Bytes(piece.input, piece.count, element_));
    }
    // May complete pieces that nobody else has a part in.
    if (within_) within_->AddOwn(CountOf(owned_));
  }

  bool HearsOf(int peer) const override {
    const bool all = op_.kind != OpKind::kReduce || rank() == Hub() || peer == Hub();
    return all || Collective::HearsOf(peer);
  }

 private:
  struct Piece {
    int home = -1;
    int owner = -1;  // In this rank's host.
    std::size_t count = 0;
    std::byte* input = nullptr;
    std::byte* result = nullptr;  // Null where this rank does not get it.
    bool final = false;
  };
  enum class Stage : std::uint8_t { kInput, kPartial, kResult };
  struct Incoming {
    Stage stage = Stage::kInput;
    std::size_t piece = 0;
  };

  static std::span<const std::byte> Bytes(const std::byte* data, std::size_t count,
                                          std::size_t element) {
    return {data, count * element};
  }
  bool AllWantResults() const { return op_.kind == OpKind::kAllReduce; }
  const std::vector<int>& Mates() const {
    return layout_.hosts[static_cast<std::size_t>(host_index_)];
  }
  int Hub() const { return op_.kind == OpKind::kReduce ? op_.root : 0; }

  // Elements of these pieces.
  std::size_t CountOf(const std::vector<std::size_t>& pieces) const {
    std::size_t count = 0;
    for (const std::size_t i : pieces) count += pieces_[i].count;
    return count;
  }
  std::size_t WithinBytes() const {
    return ReduceStream::WindowBytes(CountOf(owned_) * element_) * Mates().size();
  }
  std::size_t AcrossBytes() const {
    return ReduceStream::WindowBytes(CountOf(at_home_) * partial_element_) * layout_.hosts.size();
  }

  // What a piece must not be larger than, in elements.
  std::size_t SegmentCount() const { return kSegmentBytes / element_; }

  // Homes of the next host come first and those of this one last, so that not all hosts send to
  // the same one at first. The same in all ranks of a host, which is all that must agree.
  void MakePieces() {
    const bool one_home = op_.kind == OpKind::kReduce ||
                          (AllWantResults() &&
                           PlanAllReduce(op_.count * element_, size()) == AllReducePlan::kOneRound);
    for (int away = 1; away <= hosts_; ++away) {
      const auto next = static_cast<std::size_t>((host_index_ + away) % hosts_);
      for (const int home : layout_.hosts[next]) {
        if (one_home && home != Hub()) continue;
        if (op_.kind == OpKind::kReduceScatter) {
          const Part& part = op_.inputs[static_cast<std::size_t>(home)];
          auto* const result = static_cast<std::byte*>(home == rank() ? op_.data : nullptr);
          AddPiece(home, part.count, static_cast<std::byte*>(part.data), result);
        } else {
          AddSegments(home, one_home ? Chunk{.begin = 0, .count = op_.count}
                                     : ChunkOf(op_.count, size(), home));
        }
      }
    }
  }

  // At least one, for an empty chunk: all take part in the operation.
  void AddSegments(int home, Chunk chunk) {
    const bool wanted = AllWantResults() || home == rank();
    do {
      const std::size_t count = std::min(chunk.count, SegmentCount());
      std::byte* const data = static_cast<std::byte*>(op_.data) + chunk.begin * element_;
      AddPiece(home, count, data, wanted ? data : nullptr);
      chunk.begin += count;
      chunk.count -= count;
    } while (chunk.count > 0);
  }

  void AddPiece(int home, std::size_t count, std::byte* input, std::byte* result) {
    const int owner = layout_.OwnerIn(host_index_, home);
    if (owner == rank()) owned_.push_back(pieces_.size());
    if (home == rank()) at_home_.push_back(pieces_.size());
    if (owner == rank() && home != rank()) ++partials_left_[static_cast<std::size_t>(home)];
    pieces_.push_back(
        {.home = home, .owner = owner, .count = count, .input = input, .result = result});
  }

  // In the order in which each peer sends.
  void ExpectAll() {
    const auto due = [this](int peer, Stage stage, std::size_t piece) {
      incoming_[static_cast<std::size_t>(peer)].push_back({.stage = stage, .piece = piece});
    };
    for (const int mate : Mates()) {
      for (const std::size_t i : owned_)
        if (mate != rank()) due(mate, Stage::kInput, i);
    }
    for (int host = 0; host < hosts_; ++host) {
      for (const std::size_t i : at_home_)
        if (host != host_index_) due(layout_.OwnerIn(host, rank()), Stage::kPartial, i);
    }
    for (std::size_t i = 0; i < pieces_.size() && AllWantResults(); ++i) {
      const Piece& piece = pieces_[i];
      const int from = piece.owner == rank() ? piece.home : piece.owner;
      if (from != rank()) due(from, Stage::kResult, i);
    }
    for (int peer = 0; peer < size(); ++peer)
      Expect(peer, incoming_[static_cast<std::size_t>(peer)].size());
  }

  void MakeStreams(std::span<std::byte> scratch) {
    std::optional<ReduceStream::Plan> within = PlanWithin();
    std::optional<ReduceStream::Plan> across = PlanAcross();
    const std::span<std::byte> within_windows = scratch.first(WithinBytes());
    const std::span<std::byte> across_windows = scratch.subspan(WithinBytes(), AcrossBytes());
    std::byte* partial = scratch.data() + within_windows.size() + across_windows.size();
    std::size_t at_home = 0;
    for (std::size_t x = 0; x < owned_.size(); ++x) {
      const Piece& piece = pieces_[owned_[x]];
      within->pieces[x].out = partial;
      partials_.push_back(partial);
      if (piece.home == rank()) across->pieces[at_home++].own = partial;
      partial += piece.count * partial_element_;
    }
    if (within) within_.emplace(std::move(*within), host(), within_windows);
    if (across) across_.emplace(std::move(*across), host(), across_windows);
  }

  // Of what this rank owns. The pieces have no `out` yet.
  std::optional<ReduceStream::Plan> PlanWithin() {
    if (owned_.empty()) return std::nullopt;
    ReduceStream::Plan plan{.ranks = Mates(),
                            .own = rank(),
                            .element_bytes = element_,
                            .out_element_bytes = partial_element_};
    for (const std::size_t i : owned_)
      plan.pieces.push_back({.own = pieces_[i].input, .count = pieces_[i].count});
    plan.combine = [this](std::span<const std::byte* const> inputs, std::size_t count,
                          std::byte* out) {
      ReduceToPartial(op_.dtype, op_.reduce, op_.factor, inputs, count, out);
    };
    plan.on_piece = [this](std::size_t x) { OnPartial(x); };
    return plan;
  }

  // Of what this rank is the home of. The pieces have no `own` yet.
  std::optional<ReduceStream::Plan> PlanAcross() {
    if (at_home_.empty()) return std::nullopt;
    ReduceStream::Plan plan{.ranks = {},
                            .own = rank(),
                            .element_bytes = partial_element_,
                            .out_element_bytes = element_};
    for (int host = 0; host < hosts_; ++host) plan.ranks.push_back(layout_.OwnerIn(host, rank()));
    for (const std::size_t i : at_home_)
      plan.pieces.push_back({.out = pieces_[i].result, .count = pieces_[i].count});
    plan.combine = [this](std::span<const std::byte* const> partials, std::size_t count,
                          std::byte* out) {
      const auto ranks = static_cast<std::size_t>(size());
      ReducePartials(op_.dtype, op_.reduce, ranks, partials, count, out);
    };
    plan.on_piece = [this](std::size_t x) {
      ++finished_at_home_;
      OnResult(at_home_[x]);
    };
    return plan;
  }

  void SendNotes() {
    // Nobody needs the others once the root of a reduce is done; otherwise whoever is left when the
    // hub is done still has to know that all have entered.
    if (op_.kind == OpKind::kReduce && rank() != Hub()) return host().SendNote(Hub());
    for (int peer = 0; peer < size(); ++peer)
      if (peer != rank()) host().SendNote(peer);
  }

  // The partial of owned piece `x` is complete.
  void OnPartial(std::size_t x) {
    const Piece& piece = pieces_[owned_[x]];
    if (piece.home == rank()) return across_->AddOwn(piece.count);
    Send(piece.home, Bytes(partials_[x], piece.count, partial_element_));
    --partials_left_[static_cast<std::size_t>(piece.home)];
    SendResults();
  }

  // The result of a piece is here, and others of its host or other hosts may want it.
  void OnResult(std::size_t piece) {
    pieces_[piece].final = true;
    SendResults();
  }

  void SendResults() {
    if (!AllWantResults()) return;
    for (int host = 0; host < hosts_ && finished_at_home_ > 0; ++host) {
      if (host == host_index_) continue;
      const int owner = layout_.OwnerIn(host, rank());
      if (partials_left_[static_cast<std::size_t>(owner)] > 0) continue;
      std::size_t& sent = results_sent_[static_cast<std::size_t>(host)];
      for (; sent < finished_at_home_; ++sent) SendResult(owner, at_home_[sent]);
    }
    for (; spread_ < owned_.size() && pieces_[owned_[spread_]].final; ++spread_) {
      for (const int mate : Mates())
        if (mate != rank()) SendResult(mate, owned_[spread_]);
    }
  }

  void SendResult(int peer, std::size_t i) {
    Send(peer, Bytes(pieces_[i].result, pieces_[i].count, element_));
  }

  const Incoming& IncomingFrom(int peer, std::size_t index) const {
    return incoming_[static_cast<std::size_t>(peer)][index];
  }
  std::size_t BytesFrom(int peer, std::size_t index) const override {
    const Incoming& next = IncomingFrom(peer, index);
    return pieces_[next.piece].count *
           (next.stage == Stage::kPartial ? partial_element_ : element_);
  }
  PayloadSink* SinkFor(int peer, std::size_t index) override {
    const Incoming& next = IncomingFrom(peer, index);
    if (next.stage == Stage::kInput) return within_->SinkOf(peer);
    if (next.stage == Stage::kPartial) return across_->SinkOf(peer);
    const Piece& piece = pieces_[next.piece];
    FlatSink& sink = results_[static_cast<std::size_t>(peer)];
    sink = FlatSink({piece.result, piece.count * element_});
    return &sink;
  }
  void OnPart(int peer, std::size_t index) override {
    const Incoming& got = IncomingFrom(peer, index);
    if (got.stage == Stage::kInput) return within_->OnMessage(peer);
    if (got.stage == Stage::kPartial) return across_->OnMessage(peer);
    if (pieces_[got.piece].owner == rank()) OnResult(got.piece);
  }

  const Operation& op_;
  const HostLayout& layout_;
  const int host_index_;
  const int hosts_;
  const std::size_t element_;
  const std::size_t partial_element_;

  std::vector<Piece> pieces_;
  std::vector<std::size_t> owned_;               // Pieces that this rank owns,
  std::vector<std::size_t> at_home_;             // and those of them that it is the home of.
  std::vector<std::vector<Incoming>> incoming_;  // By peer.
  std::vector<FlatSink> results_;                // By peer: the one being received.
  std::vector<std::byte*> partials_;             // Of owned_.
  std::optional<ReduceStream> within_;
  std::optional<ReduceStream> across_;

  std::vector<std::size_t> partials_left_;  // By peer: still to be sent to it.
  std::vector<std::size_t> results_sent_;   // By host: of finished_at_home_.
  std::size_t finished_at_home_ = 0;
  std::size_t spread_ = 0;  // Owned pieces whose results were sent to the others in this host.
};

}  // namespace

std::unique_ptr<Collective> MakeHierarchicalReduction(const Operation& op, int rank,
                                                      const HostLayout& layout,
                                                      CollectiveHost& host) {
  return std::make_unique<HierarchicalReduction>(op, rank, layout, host);
}

}  // namespace resilient
