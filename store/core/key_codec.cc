#include "store/core/key_codec.h"

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace resilient::store {
namespace {

enum class WireType : std::uint8_t { kVarint = 0, kBytes = 2 };
constexpr int kTypeBits = 3;
constexpr int kVarintBits = 7;
constexpr int kReplyValue = 2;
constexpr std::size_t kLargeBytes = 64u << 10;  // To move them is cheaper than fresh memory.

// ---- The messages of store.proto ----

template <typename Type, typename... Types>
inline constexpr bool kIsOneOf = (std::is_same_v<std::remove_const_t<Type>, Types> || ...);

// Calls `visit` with each field and its number, in their order. An int64_t is an sint64.
template <typename Message, typename Visitor>
void VisitFields(Message& message, Visitor& visit) {
  if constexpr (kIsOneOf<Message, Request>) {
    visit(1, message.first_unacked);
    visit(2, message.generation);
    visit(3, message.scope);
  } else if constexpr (kIsOneOf<Message, Reply>) {
    visit(kReplyValue, message.value);
    visit(3, message.number);
    visit(4, message.flag);
    visit(7, message.values);
    visit(20, message.revision);
  } else if constexpr (kIsOneOf<Message, SetOp, AppendOp, QueuePushOp>) {
    visit(1, message.key);
    visit(2, message.value);
  } else if constexpr (kIsOneOf<Message, GetOp, QueuePopOp>) {
    visit(1, message.key);
    visit(2, message.wait);
  } else if constexpr (kIsOneOf<Message, AddOp>) {
    visit(1, message.key);
    visit(2, message.amount);
  } else if constexpr (kIsOneOf<Message, CompareSetOp>) {
    visit(1, message.key);
    visit(2, message.expected);
    visit(3, message.desired);
  } else if constexpr (kIsOneOf<Message, CheckOp, WaitOp>) {
    visit(1, message.keys);
  } else if constexpr (kIsOneOf<Message, DeleteOp, QueueLengthOp>) {
    visit(1, message.key);
  } else if constexpr (kIsOneOf<Message, MultiGetOp>) {
    visit(1, message.keys);
    visit(2, message.wait);
  } else if constexpr (kIsOneOf<Message, MultiSetOp>) {
    visit(1, message.keys);
    visit(2, message.values);
  } else {
    static_assert(kIsOneOf<Message, NumKeysOp>);
  }
}

// ---- Writing ----

std::uint64_t TagOf(int field, WireType type) {
  return static_cast<std::uint64_t>(field) << kTypeBits | static_cast<std::uint64_t>(type);
}

std::uint64_t ZigZag(std::int64_t value) {
  return static_cast<std::uint64_t>(value) << 1 ^ static_cast<std::uint64_t>(value >> 63);
}

std::size_t VarintBytes(std::uint64_t value) {
  std::size_t bytes = 1;
  for (; value >= 0x80; value >>= kVarintBits) ++bytes;
  return bytes;
}

// What a message takes. Thread: value type.
class Sizer {
 public:
  void operator()(int field, std::uint64_t value) {
    if (value != 0) bytes_ += VarintBytes(TagOf(field, WireType::kVarint)) + VarintBytes(value);
  }
  void operator()(int field, std::int64_t value) { (*this)(field, ZigZag(value)); }
  void operator()(int field, bool value) { (*this)(field, std::uint64_t{value}); }
  void operator()(int field, const std::string& value) {
    if (!value.empty()) Element(field, value.size());
  }
  void operator()(int field, const std::vector<std::string>& values) {
    for (const std::string& value : values) Element(field, value.size());
  }
  void Element(int field, std::size_t size) {
    bytes_ += VarintBytes(TagOf(field, WireType::kBytes)) + VarintBytes(size) + size;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

// Appends a message. Thread: value type.
class Writer {
 public:
  explicit Writer(std::string* out) : out_(out) {}

  void operator()(int field, std::uint64_t value) {
    if (value == 0) return;
    Varint(TagOf(field, WireType::kVarint));
    Varint(value);
  }
  void operator()(int field, std::int64_t value) { (*this)(field, ZigZag(value)); }
  void operator()(int field, bool value) { (*this)(field, std::uint64_t{value}); }
  void operator()(int field, const std::string& value) {
    if (!value.empty()) Element(field, value);
  }
  void operator()(int field, const std::vector<std::string>& values) {
    for (const std::string& value : values) Element(field, value);
  }
  void Begin(int field, std::size_t size) {
    Varint(TagOf(field, WireType::kBytes));
    Varint(size);
  }

 private:
  void Element(int field, std::string_view value) {
    Begin(field, value.size());
    out_->append(value);
  }
  void Varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= kVarintBits) {
      out_->push_back(static_cast<char>(value | 0x80));
    }
    out_->push_back(static_cast<char>(value));
  }
  std::string* out_;
};

template <typename OpType>
void AppendRequestOf(const Request& request, const OpType& op, std::string* body) {
  Sizer inner;
  VisitFields(op, inner);
  Sizer outer;
  VisitFields(request, outer);
  outer.Element(kKeyOpField<OpType>, inner.bytes());
  body->reserve(body->size() + outer.bytes());
  Writer writer(body);
  VisitFields(request, writer);
  writer.Begin(kKeyOpField<OpType>, inner.bytes());
  VisitFields(op, writer);
}

// ---- Reading ----

// One field as it came. Thread: value type.
struct Field {
  int number = 0;
  WireType type = WireType::kVarint;
  std::uint64_t value = 0;  // Of a varint.
  std::string_view bytes;   // Empty for a varint.
};

// Takes fields off the front of a message. Thread: value type.
class Reader {
 public:
  explicit Reader(std::string_view rest) : rest_(rest) {}

  bool done() const { return rest_.empty(); }
  // False: there is none that could be one of ours.
  bool Next(Field* field) {
    std::uint64_t tag = 0;
    if (!Short(&tag) || tag >> kTypeBits > kFieldMax) return false;
    field->number = static_cast<int>(tag >> kTypeBits);
    const std::uint64_t type = tag & ((1u << kTypeBits) - 1);
    if (type == static_cast<std::uint64_t>(WireType::kVarint)) {
      field->type = WireType::kVarint;
      field->bytes = {};
      return Varint(&field->value);
    }
    if (type != static_cast<std::uint64_t>(WireType::kBytes)) return false;
    field->type = WireType::kBytes;
    std::uint64_t size = 0;
    if (!Short(&size) || size > rest_.size()) return false;
    field->bytes = rest_.substr(0, static_cast<std::size_t>(size));
    rest_.remove_prefix(static_cast<std::size_t>(size));
    return true;
  }

 private:
  static constexpr std::uint64_t kFieldMax = 100;  // Ours are smaller.
  static constexpr std::size_t kShortBytesMax = 5;

  // A tag or a length. Protobuf refuses those that are spelled with more bytes than 32 bits need,
  // so it is asked.
  bool Short(std::uint64_t* value) {
    const std::size_t before = rest_.size();
    return Varint(value) && before - rest_.size() <= kShortBytesMax;
  }

  // False at the end, and for one that is longer than it had to be by far.
  bool Varint(std::uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 63 && !rest_.empty(); shift += kVarintBits) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      *value |= std::uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return true;
    }
    // The tenth byte has one bit.
    if (rest_.empty() || static_cast<unsigned char>(rest_.front()) != 1) return false;
    rest_.remove_prefix(1);
    *value |= std::uint64_t{1} << 63;
    return true;
  }

  std::string_view rest_;
};

// Puts a field where it belongs. Thread: value type.
class FieldTaker {
 public:
  explicit FieldTaker(const Field& field) : field_(field) {}

  void operator()(int number, std::uint64_t& value) {
    if (Is(number, WireType::kVarint)) value = field_.value;
  }
  void operator()(int number, std::int64_t& value) {
    if (Is(number, WireType::kVarint)) {
      value = static_cast<std::int64_t>(field_.value >> 1 ^ (~(field_.value & 1) + 1));
    }
  }
  void operator()(int number, bool& value) {
    if (Is(number, WireType::kVarint)) value = field_.value != 0;
  }
  void operator()(int number, std::string& value) {
    if (Is(number, WireType::kBytes)) value.assign(field_.bytes);
  }
  void operator()(int number, std::vector<std::string>& values) {
    if (Is(number, WireType::kBytes)) values.emplace_back(field_.bytes);
  }
  bool taken() const { return taken_; }

 private:
  bool Is(int number, WireType type) {
    const bool is = number == field_.number && type == field_.type;
    taken_ = taken_ || is;
    return is;
  }
  const Field& field_;
  bool taken_ = false;
};

template <typename Message>
bool Take(const Field& field, Message& message) {
  FieldTaker taker(field);
  VisitFields(message, taker);
  return taker.taken();
}

template <typename Message>
bool ReadFields(std::string_view bytes, Message& message) {
  Reader reader(bytes);
  Field field;
  while (!reader.done()) {
    if (!reader.Next(&field) || !Take(field, message)) return false;
  }
  return true;
}

template <std::size_t kIndex>
bool ReadAs(const Field& field, Op& op) {
  using OpType = std::variant_alternative_t<kIndex, Op>;
  if constexpr (CodedByHand<OpType>) {
    return field.number == kKeyOpField<OpType> && ReadFields(field.bytes, op.emplace<kIndex>());
  } else {
    return false;
  }
}

template <std::size_t... kIndex>
bool ReadOp(const Field& field, Op& op, std::index_sequence<kIndex...>) {
  return (ReadAs<kIndex>(field, op) || ...);
}

}  // namespace

bool AppendKeyRequest(const Request& request, std::string* body) {
  return std::visit(
      [&](const auto& op) {
        if constexpr (CodedByHand<std::decay_t<decltype(op)>>) {
          AppendRequestOf(request, op, body);
          return true;
        } else {
          return false;
        }
      },
      request.op);
}

bool AppendPlainReply(const Reply& reply, std::string* body) {
  if (!reply.status.ok() || reply.welcome || !reply.status_json.empty() || !reply.events.empty()) {
    return false;
  }
  Sizer sizer;
  VisitFields(reply, sizer);
  body->reserve(body->size() + sizer.bytes());
  Writer writer(body);
  VisitFields(reply, writer);
  return true;
}

void BeginReplyValue(std::size_t bytes, std::string* body) {
  Writer(body).Begin(kReplyValue, bytes);
}

std::optional<Request> ReadKeyRequest(std::string_view body) {
  std::optional<Request> request(std::in_place);
  Reader reader(body);
  Field field;
  bool has_op = false;
  while (!reader.done()) {
    if (!reader.Next(&field)) return std::nullopt;
    if (Take(field, *request)) continue;
    // A second operation would have to be merged with the first.
    if (std::exchange(has_op, true) || field.type != WireType::kBytes) return std::nullopt;
    if (!ReadOp(field, request->op, std::make_index_sequence<std::variant_size_v<Op>>())) {
      return std::nullopt;
    }
  }
  if (!has_op) return std::nullopt;
  return request;
}

std::optional<Reply> ReadPlainReply(std::string& body) {
  std::optional<Reply> reply(std::in_place);
  Reader reader(body);
  Field field;
  std::string_view large;
  while (!reader.done()) {
    if (!reader.Next(&field)) return std::nullopt;
    if (field.number == kReplyValue) large = {};  // The last one counts.
    if (field.number == kReplyValue && field.bytes.size() >= kLargeBytes) {
      large = field.bytes;
    } else if (!Take(field, *reply)) {
      return std::nullopt;
    }
  }
  if (large.empty()) return reply;
  const auto begin = static_cast<std::size_t>(large.data() - body.data());
  body.resize(begin + large.size());
  body.erase(0, begin);
  reply->value = std::move(body);
  return reply;
}

}  // namespace resilient::store
