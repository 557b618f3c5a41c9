#include "store/tcpstore/query.h"

#include <algorithm>
#include <array>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "store/core/messages.h"

namespace resilient::store::tcpstore {
namespace {

constexpr std::uint64_t kMagic = 0x3C85F7CE;
constexpr std::size_t kReservedAtOnce = 64u << 10;  // Of a text that is announced.

// The fields of each query, a letter each: m magic number, p nonce, n number, k key, v value, c how
// many rounds follow, each of the fields of `round`.
struct Layout {
  std::string_view name;
  std::string_view fields;
  std::string_view round{};
};

constexpr std::array kLayouts = {
    Layout{"VALIDATE", "m"},   Layout{"SET", "kv"},           Layout{"COMPARE_SET", "kvv"},
    Layout{"GET", "k"},        Layout{"ADD", "kn"},           Layout{"CHECK", "c", "k"},
    Layout{"WAIT", "c", "k"},  Layout{"GETNUMKEYS", ""},      Layout{"DELETE_KEY", "k"},
    Layout{"APPEND", "kv"},    Layout{"MULTI_GET", "c", "k"}, Layout{"MULTI_SET", "c", "kv"},
    Layout{"CANCEL_WAIT", ""}, Layout{"PING", "p"},           Layout{"QUEUE_PUSH", "kv"},
    Layout{"QUEUE_POP", "k"},  Layout{"QUEUE_LEN", "k"},      Layout{"LIST_KEYS", ""},
    Layout{"BARRIER", "kn"},
};

const Layout& LayoutOf(QueryType type) { return kLayouts.at(static_cast<std::size_t>(type)); }

// Of a size that the compiler knows, so that each is one load or store.
template <std::size_t kSize>
std::uint64_t LittleEndian(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < kSize; ++i) {
    value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  return value;
}

template <std::size_t kSize>
void AppendLittleEndian(std::uint64_t value, std::string& out) {
  std::array<char, kSize> bytes{};
  for (std::size_t i = 0; i < kSize; ++i) bytes[i] = static_cast<char>(value >> (8 * i) & 0xff);
  out.append(bytes.data(), kSize);
}

}  // namespace

std::string_view NameOf(QueryType type) { return LayoutOf(type).name; }

Status QueryParser::Feed(std::string_view bytes) {
  if (input_.empty()) {
    Parse(bytes);
    input_.assign(bytes);
  } else {
    input_.erase(0, at_);
    input_.append(bytes);
    std::string_view rest = input_;
    Parse(rest);
    at_ = input_.size() - rest.size();
  }
  if (at_ == input_.size()) input_.clear();
  if (input_.empty()) at_ = 0;
  return status_;
}

Query QueryParser::Take() {
  RESILIENT_CHECK(complete_);
  Query taken = std::exchange(query_, {});
  complete_ = false;
  piece_ = Piece::kType;
  bytes_ = 0;
  std::string_view rest = std::string_view(input_).substr(at_);
  Parse(rest);
  at_ = input_.size() - rest.size();
  if (at_ == input_.size()) {
    input_.clear();
    at_ = 0;
  }
  return taken;
}

void QueryParser::Parse(std::string_view& bytes) {
  while (status_.ok() && !complete_ && ParsePiece(bytes)) {
  }
}

bool QueryParser::ParsePiece(std::string_view& bytes) {
  if (piece_ == Piece::kText) {
    if (bytes.empty()) return false;
    const std::size_t size = std::min(text_left_, bytes.size());
    text_->append(bytes.substr(0, size));
    bytes.remove_prefix(size);
    text_left_ -= size;
    if (text_left_ == 0) Advance();
    return true;
  }
  if (piece_ == Piece::kType) return ReadNumber<1>(bytes);
  if (piece_ == Piece::kMagic || piece_ == Piece::kNonce) return ReadNumber<4>(bytes);
  return ReadNumber<8>(bytes);
}

template <std::size_t kSize>
bool QueryParser::ReadNumber(std::string_view& bytes) {
  if (bytes.size() < kSize) return false;
  const std::uint64_t value = LittleEndian<kSize>(bytes);
  bytes.remove_prefix(kSize);
  Read(value);
  return true;
}

void QueryParser::Read(std::uint64_t value) {
  switch (piece_) {
    case Piece::kType:
      return Begin(value);
    case Piece::kMagic:
      if (value != kMagic) return Fail(StatusCode::kProtocol, "it begins with a wrong number");
      validated_ = true;
      return Advance();
    case Piece::kNonce:
    case Piece::kNumber:
      query_.number = static_cast<std::int64_t>(value);
      return Advance();
    case Piece::kCount:
      return BeginRounds(value);
    case Piece::kLength:
      return BeginText(value);
    case Piece::kText:
      break;
  }
  RESILIENT_CHECK(false);
}

void QueryParser::Begin(std::uint64_t type) {
  if (type >= kLayouts.size()) {
    return Fail(StatusCode::kProtocol,
                StrCat("it asks for number ", type, ", which no TCPStore up to torch 2.15 knows"));
  }
  query_.type = static_cast<QueryType>(type);
  if ((query_.type == QueryType::kValidate) == validated_) {
    return Fail(StatusCode::kProtocol,
                StrCat("it says ", NameOf(query_.type), " where ",
                       validated_ ? "it has said so before" : "it has to say VALIDATE first"));
  }
  fields_ = LayoutOf(query_.type).fields;
  Advance();
}

void QueryParser::BeginRounds(std::uint64_t count) {
  if (count > kKeysPerQueryMax) {
    return Fail(StatusCode::kTooLarge, StrCat("its ", NameOf(query_.type), " names ", count,
                                              " keys; at most ", kKeysPerQueryMax, " are taken"));
  }
  if (count > 0) {
    rounds_left_ = count - 1;
    fields_ = LayoutOf(query_.type).round;
  }
  Advance();
}

void QueryParser::BeginText(std::uint64_t length) {
  const bool key = field_ == 'k';
  const std::size_t most = key ? kKeyBytesMax : kValueBytesMax;
  if (length > most) {
    return Fail(StatusCode::kTooLarge,
                StrCat("its ", NameOf(query_.type), " has a ", key ? "key" : "value", " of ",
                       length, " bytes; at most ", most, " are taken"));
  }
  bytes_ += length + sizeof(std::string);
  if (bytes_ > kQueryBytesMax) {
    return Fail(StatusCode::kTooLarge, StrCat("its ", NameOf(query_.type), " takes more than ",
                                              kQueryBytesMax, " bytes; split it"));
  }
  text_ = &(key ? query_.keys : query_.values).emplace_back();
  text_left_ = length;
  if (length == 0) return Advance();
  text_->reserve(std::min<std::size_t>(length, kReservedAtOnce));
  piece_ = Piece::kText;
}

void QueryParser::Advance() {
  if (fields_.empty() && rounds_left_ > 0) {
    --rounds_left_;
    fields_ = LayoutOf(query_.type).round;
  }
  if (fields_.empty()) {
    complete_ = true;
    return;
  }
  field_ = fields_.front();
  fields_.remove_prefix(1);
  switch (field_) {
    case 'm':
      piece_ = Piece::kMagic;
      break;
    case 'p':
      piece_ = Piece::kNonce;
      break;
    case 'n':
      piece_ = Piece::kNumber;
      break;
    case 'c':
      piece_ = Piece::kCount;
      break;
    default:
      piece_ = Piece::kLength;
      break;
  }
}

void QueryParser::Fail(StatusCode code, std::string text) {
  status_ = Status(code, std::move(text));
}

void AppendByte(std::uint8_t value, std::string& out) { AppendLittleEndian<1>(value, out); }

void AppendNonce(std::int64_t value, std::string& out) {
  AppendLittleEndian<4>(static_cast<std::uint64_t>(value), out);
}

void AppendNumber(std::int64_t value, std::string& out) {
  AppendLittleEndian<8>(static_cast<std::uint64_t>(value), out);
}

void AppendText(std::string_view text, std::string& out) {
  AppendLittleEndian<8>(text.size(), out);
  out.append(text);
}

}  // namespace resilient::store::tcpstore
