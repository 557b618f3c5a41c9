#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/status.h>

// The bytes of PyTorch's TCPStore protocol (libuv backend, torch 2.11 to 2.15): a query is one byte
// that says what it is, then fields; numbers are little-endian, a text is its length as u64 and its
// bytes. There are no versions, no numbers of requests and no errors: what cannot be answered ends
// the connection.
namespace resilient::store::tcpstore {

// What a client says first of all: VALIDATE and the magic number. The server recognises the
// protocol by it, as no other one here begins so.
inline constexpr char kFirstByte = '\0';

// Limits. Those of a key and a value are the store's own (messages.h) and TCPStore's alike.
inline constexpr std::size_t kKeysPerQueryMax = 128u << 10;
// Of one query as it comes together, so that no client fills the memory.
inline constexpr std::size_t kQueryBytesMax = 32u << 20;

// The numbers are those of the wire.
enum class QueryType : std::uint8_t {
  kValidate = 0,
  kSet,
  kCompareSet,
  kGet,
  kAdd,
  kCheck,
  kWait,
  kNumKeys,
  kDeleteKey,
  kAppend,
  kMultiGet,
  kMultiSet,
  kCancelWait,
  kPing,
  kQueuePush,
  kQueuePop,
  kQueueLength,
  kListKeys,
  kBarrier,
};

struct Query {
  QueryType type = QueryType::kValidate;
  std::vector<std::string> keys;
  std::vector<std::string> values;
  std::int64_t number = 0;  // What to add, the size of a barrier, the nonce of a ping.
};

// Makes queries of a stream of bytes, one at a time: what comes behind a complete one is looked at
// once that is taken, so that a flood of small queries takes no more memory than its bytes. No byte
// is parsed twice. Owner: Client. Thread: caller-synchronised. Pure.
class QueryParser {
 public:
  // kProtocol: the stream is none of TCPStore's; kTooLarge: a length is beyond the limits. Sticky.
  Status Feed(std::string_view bytes);
  bool HasQuery() const { return complete_; }
  // Afterwards the next one may be there, or status() say why none comes. REQUIRES: HasQuery().
  Query Take();
  const Status& status() const { return status_; }
  // Bytes kept of a query that is not whole yet.
  std::size_t PartialBytes() const { return complete_ ? 0 : bytes_ + input_.size() - at_; }

 private:
  enum class Piece : std::uint8_t { kType, kMagic, kNonce, kNumber, kCount, kLength, kText };

  // Takes what it can use off the front.
  void Parse(std::string_view& bytes);
  bool ParsePiece(std::string_view& bytes);  // False: it needs more bytes.
  template <std::size_t kSize>
  bool ReadNumber(std::string_view& bytes);  // Likewise.
  void Read(std::uint64_t value);
  void Begin(std::uint64_t type);
  void BeginRounds(std::uint64_t count);
  void BeginText(std::uint64_t length);
  // To the next field of the query, or to its end.
  void Advance();
  void Fail(StatusCode code, std::string text);

  Status status_;
  std::string input_;  // From at_ on not parsed yet.
  std::size_t at_ = 0;
  Query query_;
  bool complete_ = false;
  bool validated_ = false;
  Piece piece_ = Piece::kType;
  char field_ = 0;                 // Whose piece it is: a letter of a layout.
  std::string_view fields_;        // The letters behind it, of this round.
  std::uint64_t rounds_left_ = 0;  // Behind this one.
  std::string* text_ = nullptr;    // That is being read.
  std::size_t text_left_ = 0;
  std::size_t bytes_ = 0;  // Of the texts of this query.
};

// Fields of an answer, appended.
void AppendByte(std::uint8_t value, std::string& out);
void AppendNonce(std::int64_t value, std::string& out);  // u32.
void AppendNumber(std::int64_t value, std::string& out);
void AppendText(std::string_view text, std::string& out);

// Answers of one byte.
inline constexpr std::uint8_t kReady = 0;     // Of CHECK.
inline constexpr std::uint8_t kNotReady = 1;  // Likewise.
inline constexpr std::uint8_t kStopWaiting = 0;
inline constexpr std::uint8_t kWaitCancelled = 1;

// "COMPARE_SET", as torch calls it.
std::string_view NameOf(QueryType type);

}  // namespace resilient::store::tcpstore
