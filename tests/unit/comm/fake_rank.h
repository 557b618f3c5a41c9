#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/comm/endpoint.h"
#include "runtime/comm/mismatch.h"
#include "runtime/comm/wire.h"
#include "runtime/net/socket.h"
#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {

// A rank of which there is nothing but the bytes that the test sends.
class FakeRank {
 public:
  FakeRank(World& world, const GroupSpec& spec, int rank, Lane lane) : world_(world) {
    for (int peer = 0; peer < world.size(); ++peer) {
      const Hello hello{.generation = spec.generation,
                        .attempt = spec.attempt,
                        .from = rank,
                        .to = peer,
                        .lane = lane,
                        .group = spec.name,
                        .made = RanksOf(spec)};
      auto socket = ConnectTcp(*ParseHostPort(DecodeEndpoint(world.endpoint(peer)).address),
                               world.clock, Deadline::After(world.clock.Now(), kBound), -1);
      EXPECT_TRUE(socket.ok()) << socket.status().ToString();
      links_.push_back(std::move(*socket));
      const std::string said = SayHello(hello, spec.secret);
      Send(links_.back(), said);
      EXPECT_EQ(Receive(links_.back(), kHelloReplyBytes),
                EncodeHelloReply(HelloVerdict::kAccepted, ProofOf(said), spec.secret));
    }
  }

  // Enters `op` towards all, and sends a part of its data only.
  void EnterAndStand(const Operation& op, std::uint64_t seq, std::size_t bytes, std::size_t sent) {
    MessageHeader header = HeaderOf(op, seq);
    header.payload_bytes = bytes;
    for (const FileDescriptor& link : links_)
      Send(link, EncodeMessage(header) + std::string(sent, 0));
  }

  // To all.
  void Say(const std::string& bytes) {
    for (const FileDescriptor& link : links_) Send(link, bytes);
  }
  // Of the next message that `peer` sends here, which has no payload.
  PointToPointPhase HearPhase(int peer) {
    const auto& link = links_[static_cast<std::size_t>(peer)];
    const Result<MessageHeader> header = DecodeMessage(Receive(link, kMessageHeaderBytes));
    EXPECT_TRUE(header.ok());
    return static_cast<PointToPointPhase>(header->phase);
  }

 private:
  static void Send(const FileDescriptor& link, const std::string& bytes) {
    EXPECT_EQ(send(link.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  std::string Receive(const FileDescriptor& link, std::size_t bytes) {
    std::string text;
    while (text.size() < bytes) {
      std::vector<PollEntry> entries{{.fd = link.get(), .events = POLLIN}};
      const Deadline deadline = Deadline::After(world_.clock.Now(), kBound);
      std::string part(bytes - text.size(), 0);
      if (PollUntil(entries, world_.clock, deadline) != 1) return text;
      const ssize_t n = recv(link.get(), part.data(), part.size(), 0);
      if (n <= 0) return text;
      text.append(part, 0, static_cast<std::size_t>(n));
    }
    return text;
  }

  World& world_;
  std::vector<FileDescriptor> links_;
};

// The spec of a group of all ranks and one more, which is the test's.
inline GroupSpec SpecWithFake(const World& world, int rank) {
  GroupSpec spec = world.Spec("faked", rank);
  spec.members.push_back(
      {.global_rank = world.size(), .endpoint = "127.0.0.1:1", .host = "fake", .pid = 66});
  return spec;
}

}  // namespace resilient::testing
