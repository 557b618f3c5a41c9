#include "store.pb.h"
#include "store/core/codec_parts.h"

namespace resilient::store {

namespace pb = ::resilient::store::v1;

namespace {

void Put(const DeviceClaim& claim, pb::DeviceClaim* out) {
  out->set_uuid(Utf8(claim.uuid));
  out->set_host(Utf8(claim.host));
  out->set_ordinal(claim.ordinal);
  out->set_visible(claim.visible);
  out->set_visible_devices(Utf8(claim.visible_devices));
  out->set_local_rank(claim.local_rank);
}

DeviceClaim ToDevice(const pb::DeviceClaim& message) {
  DeviceClaim claim;
  claim.uuid = message.uuid();
  claim.host = message.host();
  claim.ordinal = message.ordinal();
  claim.visible = message.visible();
  claim.visible_devices = message.visible_devices();
  claim.local_rank = message.local_rank();
  return claim;
}

}  // namespace

void PutOp(const JoinOp& op, pb::Request* out) {
  pb::JoinRequest* message = out->mutable_join();
  message->set_rank(op.request.rank);
  message->set_world_size(op.request.world_size);
  message->set_endpoint(op.request.endpoint);
  message->set_join_timeout_ms(ToMillis(op.request.join_timeout));
  message->set_seat_wait_ms(ToMillis(op.request.seat_wait));
  message->set_generation(op.request.generation);
  message->set_min_world(op.request.min_world);
  message->set_number(op.request.number);
  message->set_spare_if_taken(op.request.spare_if_taken);
  if (op.request.device) Put(*op.request.device, message->mutable_device());
}

Op ToJoin(const pb::JoinRequest& message) {
  JoinOp join;
  join.request.rank = message.rank();
  join.request.world_size = message.world_size();
  join.request.endpoint = message.endpoint();
  join.request.join_timeout = FromMillis(message.join_timeout_ms());
  join.request.seat_wait = FromMillis(message.seat_wait_ms());
  join.request.generation = message.generation();
  join.request.min_world = message.min_world();
  join.request.number = message.number();
  join.request.spare_if_taken = message.spare_if_taken();
  if (message.has_device()) join.request.device = ToDevice(message.device());
  return join;
}

void Put(const Welcome& welcome, pb::Welcome* out) {
  out->set_server(Utf8(welcome.server));
  out->set_version(welcome.version);
  out->set_lease_ttl_ms(welcome.lease_ttl_ms);
  out->set_heartbeat_interval_ms(welcome.heartbeat_interval_ms);
  out->set_key_bytes_max(welcome.key_bytes_max);
  out->set_value_bytes_max(welcome.value_bytes_max);
  out->set_session_known(welcome.session_known);
  out->set_keys_per_request_max(welcome.keys_per_request_max);
  out->set_requests_in_flight_max(welcome.requests_in_flight_max);
  out->set_frame_body_bytes_max(welcome.frame_body_bytes_max);
  out->set_began_unix_ms(welcome.began_unix_ms);
}

Welcome ToWelcome(const pb::Welcome& welcome) {
  return {.server = welcome.server(),
          .version = welcome.version(),
          .lease_ttl_ms = welcome.lease_ttl_ms(),
          .heartbeat_interval_ms = welcome.heartbeat_interval_ms(),
          .key_bytes_max = welcome.key_bytes_max(),
          .value_bytes_max = welcome.value_bytes_max(),
          .session_known = welcome.session_known(),
          .keys_per_request_max = welcome.keys_per_request_max(),
          .requests_in_flight_max = welcome.requests_in_flight_max(),
          .frame_body_bytes_max = welcome.frame_body_bytes_max(),
          .began_unix_ms = welcome.began_unix_ms()};
}

}  // namespace resilient::store
