//! Faults of which each must fail a test of the groups of its folder. They were chosen with a fixed
//! seed among all conditions, statements and bodies of functions that return a simple value, 15 in
//! each of four folders. One was in a function that nothing called, and went with it.

use super::edits::Edit;

pub(crate) struct Chosen {
    pub(crate) name: &'static str,
    pub(crate) edit: Edit,
}

/// Mutants that no test can notice: the function does nothing without them, too, and the services
/// are in the order in which they are sorted.
pub(crate) const SURVIVORS: &[&str] =
    &["replay_interim_does_nothing", "inventory_inventory_removed"];

pub(crate) const MUTANTS: &[Chosen] = &[
    Chosen {
        name: "agent_edit_negated",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/agent.rs",
            from: "if edited == *record {",
            to: "if MUTANT != (edited == *record) {",
        },
    },
    Chosen {
        name: "certificate_use_domains_does_nothing",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/certificate.rs",
            from: "pub(crate) fn use_domains(&self, records: &Records, changed: \
                   Option<&[DomainName]>) {",
            to: "pub(crate) fn use_domains(&self, records: &Records, changed: \
                 Option<&[DomainName]>) { if MUTANT { return; }",
        },
    },
    Chosen {
        name: "certificate_store_domain_does_nothing",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/certificate.rs",
            from: "        update: impl Fn(&AcmeRecord, &mut DomainRecord, Timestamp) -> \
                   Result<(), ControlError>,
    ) -> Result<(), ControlError> {",
            to: "        update: impl Fn(&AcmeRecord, &mut DomainRecord, Timestamp) -> \
                 Result<(), ControlError>,
    ) -> Result<(), ControlError> { if MUTANT { return Ok(()); }",
        },
    },
    Chosen {
        name: "claim_note_is_true",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/domain/claim.rs",
            from: "pub(super) fn note(record: &mut DomainRecord, finding: &Finding, now: \
                   Timestamp) -> bool {",
            to: "pub(super) fn note(record: &mut DomainRecord, finding: &Finding, now: Timestamp) \
                 -> bool { if MUTANT { return true; }",
        },
    },
    Chosen {
        name: "listed_of_service_is_empty",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/domain/listed.rs",
            from: ") -> Vec<DomainView> {",
            to: ") -> Vec<DomainView> { if MUTANT { return Vec::new(); }",
        },
    },
    Chosen {
        name: "view_last_failure_negated",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/domain/view.rs",
            from: "if record.certificate.is_some() || !record.state.is_served() {",
            to: "if MUTANT != (record.certificate.is_some() || !record.state.is_served()) {",
        },
    },
    Chosen {
        name: "view_last_failure_negated_2",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/domain/view.rs",
            from: "if !control.has_authority() {",
            to: "if MUTANT != (!control.has_authority()) {",
        },
    },
    Chosen {
        name: "inventory_inventory_removed",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/inventory.rs",
            from: "services.sort_unstable();",
            to: "if !MUTANT { services.sort_unstable(); }",
        },
    },
    Chosen {
        name: "service_delete_removed",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/service.rs",
            from: "steps.push(Step::Put(StoredRecord::Agent(record)));",
            to: "if !MUTANT { steps.push(Step::Put(StoredRecord::Agent(record))); }",
        },
    },
    Chosen {
        name: "service_counts_begin_does_nothing",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/service_counts.rs",
            from: "fn begin(&self, directory: &Directory, slots: Arc<[NodeSlot]>) {",
            to: "fn begin(&self, directory: &Directory, slots: Arc<[NodeSlot]>) { if MUTANT { \
                 return; }",
        },
    },
    Chosen {
        name: "service_counts_note_negated",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/service_counts.rs",
            from: "if counts.slots.is_empty() {",
            to: "if MUTANT != (counts.slots.is_empty()) {",
        },
    },
    Chosen {
        name: "service_counts_is_known_is_false",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/service_counts.rs",
            from: "fn is_known(&self) -> bool {",
            to: "fn is_known(&self) -> bool { if MUTANT { return false; }",
        },
    },
    Chosen {
        name: "signing_key_rotate_negated",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/signing_key.rs",
            from: "if !deleted.is_empty() {",
            to: "if MUTANT != (!deleted.is_empty()) {",
        },
    },
    Chosen {
        name: "signing_key_status_negated",
        edit: Edit {
            file: "gateway/control-plane/src/control/records/signing_key.rs",
            from: "if key.active_from > now {",
            to: "if MUTANT != (key.active_from > now) {",
        },
    },
    Chosen {
        name: "caller_secrets_create_removed",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/pages/records/caller_secrets.rs",
            from: r#"    if allowed_services.is_empty() {
        form.refuse("allowed_services", AT_LEAST_ONE);"#,
            to: r#"    if allowed_services.is_empty() {
        if !MUTANT { form.refuse("allowed_services", AT_LEAST_ONE); }"#,
        },
    },
    Chosen {
        name: "address_of_sign_in_removed",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/address.rs",
            from: r#"query.append_pair("ended", "yes");"#,
            to: r#"if !MUTANT { query.append_pair("ended", "yes"); }"#,
        },
    },
    Chosen {
        name: "error_guide_about_removed",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/error_guide.rs",
            from: "parts.push(part(block));",
            to: "if !MUTANT { parts.push(part(block)); }",
        },
    },
    Chosen {
        name: "format_relative_negated",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/format.rs",
            from: "if at > now {",
            to: "if MUTANT != (at > now) {",
        },
    },
    Chosen {
        name: "body_show_removed",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/forms/body.rs",
            from: "notes.push(\"JSON, shown without indentation because it would be too \
                   long.\".to_owned());",
            to: "if !MUTANT { notes.push(\"JSON, shown without indentation because it would be too \
                 long.\".to_owned()); }",
        },
    },
    Chosen {
        name: "body_in_lines_is_none",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/forms/body.rs",
            from: "fn in_lines(json: &str) -> Option<String> {",
            to: "fn in_lines(json: &str) -> Option<String> { if MUTANT { return None; }",
        },
    },
    Chosen {
        name: "body_in_lines_negated",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/forms/body.rs",
            from: "if lines.len() > LINES_MAX {",
            to: "if MUTANT != (lines.len() > LINES_MAX) {",
        },
    },
    Chosen {
        name: "body_new_line_removed",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/forms/body.rs",
            from: r#"lines.extend(std::iter::repeat_n("  ", depth.min(20)));"#,
            to: r#"if !MUTANT { lines.extend(std::iter::repeat_n("  ", depth.min(20))); }"#,
        },
    },
    Chosen {
        name: "body_dump_removed",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/forms/body.rs",
            from: "text.extend(sixteen.iter().map(visible));",
            to: "if !MUTANT { text.extend(sixteen.iter().map(visible)); }",
        },
    },
    Chosen {
        name: "form_filled_is_none",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/forms/form.rs",
            from: "pub(crate) fn filled(&self, name: &str) -> Option<String> {",
            to: "pub(crate) fn filled(&self, name: &str) -> Option<String> { if MUTANT { return \
                 None; }",
        },
    },
    Chosen {
        name: "form_confirms_is_true",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/forms/form.rs",
            from: "pub(crate) fn confirms(&mut self, id: &str) -> bool {",
            to: "pub(crate) fn confirms(&mut self, id: &str) -> bool { if MUTANT { return true; }",
        },
    },
    Chosen {
        name: "form_refused_by_does_nothing",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/forms/form.rs",
            from: "pub(crate) fn refused_by(&mut self, error: ControlError) -> Result<(), \
                   ControlError> {",
            to: "pub(crate) fn refused_by(&mut self, error: ControlError) -> Result<(), \
                 ControlError> { if MUTANT { return Ok(()); }",
        },
    },
    Chosen {
        name: "guard_signed_in_removed",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/guard.rs",
            from: "request.extensions_mut().insert(form);",
            to: "if !MUTANT { request.extensions_mut().insert(form); }",
        },
    },
    Chosen {
        name: "session_is_open_is_none",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/session.rs",
            from: "pub(crate) fn is_open(&self, key: SessionKey, now: Instant) -> Option<bool> {",
            to: "pub(crate) fn is_open(&self, key: SessionKey, now: Instant) -> Option<bool> { if \
                 MUTANT { return None; }",
        },
    },
    Chosen {
        name: "session_put_removed",
        edit: Edit {
            file: "gateway/control-plane/src/admin/console/web/session.rs",
            from: "sessions.remove(&oldest);",
            to: "if !MUTANT { sessions.remove(&oldest); }",
        },
    },
    Chosen {
        name: "config_of_command_line_is_none",
        edit: Edit {
            file: "agent/src/backend/config.rs",
            from: r#"        host: Option<&str>,
        mistakes: &mut Vec<String>,
    ) -> Option<Self> {"#,
            to: r#"        host: Option<&str>,
        mistakes: &mut Vec<String>,
    ) -> Option<Self> { if MUTANT { return None; }"#,
        },
    },
    Chosen {
        name: "connect_awaits_does_nothing",
        edit: Edit {
            file: "agent/src/backend/connect.rs",
            from: "pub(super) fn awaits(&self, awaited: String) {",
            to: "pub(super) fn awaits(&self, awaited: String) { if MUTANT { return; }",
        },
    },
    Chosen {
        name: "connect_connect_removed",
        edit: Edit {
            file: "agent/src/backend/connect.rs",
            from: r#"attempt.awaits("the queue of the socket is full".to_owned());"#,
            to: r#"if !MUTANT { attempt.awaits("the queue of the socket is full".to_owned()); }"#,
        },
    },
    Chosen {
        name: "exchange_is_done_is_false",
        edit: Edit {
            file: "agent/src/backend/exchange.rs",
            from: "pub(crate) fn is_done(&self) -> bool {",
            to: "pub(crate) fn is_done(&self) -> bool { if MUTANT { return false; }",
        },
    },
    Chosen {
        name: "h1_check_beginning_negated",
        edit: Edit {
            file: "agent/src/backend/h1.rs",
            from: "if TLS_RECORDS.contains(&received[0]) {",
            to: "if MUTANT != (TLS_RECORDS.contains(&received[0])) {",
        },
    },
    Chosen {
        name: "response_drop_does_nothing",
        edit: Edit {
            file: "agent/src/backend/h2/response.rs",
            from: "fn drop(&mut self) {",
            to: "fn drop(&mut self) { if MUTANT { return; }",
        },
    },
    Chosen {
        name: "health_check_keep_checking_health_negated",
        edit: Edit {
            file: "agent/src/backend/health_check.rs",
            from: "if self.health_check == HealthCheck::Off {",
            to: "if MUTANT != (self.health_check == HealthCheck::Off) {",
        },
    },
    Chosen {
        name: "pool_look_negated",
        edit: Edit {
            file: "agent/src/backend/pool.rs",
            from: "if unanswered > 0 {",
            to: "if MUTANT != (unanswered > 0) {",
        },
    },
    Chosen {
        name: "pool_keep_looking_up_does_nothing",
        edit: Edit {
            file: "agent/src/backend/pool.rs",
            from: "pub(super) async fn keep_looking_up(&self) {",
            to: "pub(super) async fn keep_looking_up(&self) { if MUTANT { return; }",
        },
    },
    Chosen {
        name: "pool_attempting_removed",
        edit: Edit {
            file: "agent/src/backend/pool.rs",
            from: "self.connects.set(self.connects.get() + 1);",
            to: "if !MUTANT { self.connects.set(self.connects.get() + 1); }",
        },
    },
    Chosen {
        name: "lease_http1_exchange_removed",
        edit: Edit {
            file: "agent/src/backend/pool/lease.rs",
            from: "connection.begin();",
            to: "if !MUTANT { connection.begin(); }",
        },
    },
    Chosen {
        name: "lease_is_unprocessed_is_false",
        edit: Edit {
            file: "agent/src/backend/pool/lease.rs",
            from: "pub(crate) fn is_unprocessed(&self, error: &ResponseError) -> bool {",
            to: "pub(crate) fn is_unprocessed(&self, error: &ResponseError) -> bool { if MUTANT { \
                 return false; }",
        },
    },
    Chosen {
        name: "lease_is_lost_is_false",
        edit: Edit {
            file: "agent/src/backend/pool/lease.rs",
            from: "pub(crate) fn is_lost(&self, error: &ResponseError) -> bool {",
            to: "pub(crate) fn is_lost(&self, error: &ResponseError) -> bool { if MUTANT { return \
                 false; }",
        },
    },
    Chosen {
        name: "lease_is_http2_is_true",
        edit: Edit {
            file: "agent/src/backend/pool/lease.rs",
            from: "pub(crate) fn is_http2(&self) -> bool {",
            to: "pub(crate) fn is_http2(&self) -> bool { if MUTANT { return true; }",
        },
    },
    Chosen {
        name: "origin_dial_removed",
        edit: Edit {
            file: "agent/src/backend/pool/origin.rs",
            from: "self.refused_until.set(Some(until));",
            to: "if !MUTANT { self.refused_until.set(Some(until)); }",
        },
    },
    Chosen {
        name: "carry_carry_does_nothing",
        edit: Edit {
            file: "gateway/data-plane/src/relay/carry.rs",
            from: r#"    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Result<(), Stopped> {"#,
            to: r#"    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Result<(), Stopped> { if MUTANT { return Ok(()); }"#,
        },
    },
    Chosen {
        name: "carry_send_removed",
        edit: Edit {
            file: "gateway/data-plane/src/relay/carry.rs",
            from: "upload.abort();",
            to: "if !MUTANT { upload.abort(); }",
        },
    },
    Chosen {
        name: "for_node_drive_does_nothing",
        edit: Edit {
            file: "gateway/data-plane/src/relay/for_node.rs",
            from: ") -> Result<(), TunnelError> {",
            to: ") -> Result<(), TunnelError> { if MUTANT { return Ok(()); }",
        },
    },
    Chosen {
        name: "for_node_moved_to_negated",
        edit: Edit {
            file: "gateway/data-plane/src/relay/for_node.rs",
            from: "if upstream.lifecycle.sends_nodes_away() {",
            to: "if MUTANT != (upstream.lifecycle.sends_nodes_away()) {",
        },
    },
    Chosen {
        name: "for_node_head_does_nothing",
        edit: Edit {
            file: "gateway/data-plane/src/relay/for_node.rs",
            from: "async fn head(&mut self, head: RelayedHead) -> Result<(), CallerGone> {",
            to: "async fn head(&mut self, head: RelayedHead) -> Result<(), CallerGone> { if MUTANT \
                 { return Ok(()); }",
        },
    },
    Chosen {
        name: "for_node_has_begun_is_true",
        edit: Edit {
            file: "gateway/data-plane/src/relay/for_node.rs",
            from: "fn has_begun(&self) -> bool {",
            to: "fn has_begun(&self) -> bool { if MUTANT { return true; }",
        },
    },
    Chosen {
        name: "for_worker_admit_and_open_negated",
        edit: Edit {
            file: "gateway/data-plane/src/relay/for_worker.rs",
            from: "if origin.is_whole && upstream.wait_until(&admitted.0, began).is_some() {",
            to: "if MUTANT != (origin.is_whole && upstream.wait_until(&admitted.0, \
                 began).is_some()) {",
        },
    },
    Chosen {
        name: "for_worker_admit_and_open_negated_2",
        edit: Edit {
            file: "gateway/data-plane/src/relay/for_worker.rs",
            from: "if charge_waits || turn.is_some() {",
            to: "if MUTANT != (charge_waits || turn.is_some()) {",
        },
    },
    Chosen {
        name: "for_worker_head_does_nothing",
        edit: Edit {
            file: "gateway/data-plane/src/relay/for_worker.rs",
            from: "async fn head(&mut self, head: RelayedHead) -> Result<(), CallerGone> {",
            to: "async fn head(&mut self, head: RelayedHead) -> Result<(), CallerGone> { if MUTANT \
                 { return Ok(()); }",
        },
    },
    Chosen {
        name: "relay_permit_negated",
        edit: Edit {
            file: "gateway/data-plane/src/relay/mod.rs",
            from: "if !service.settings.enabled {",
            to: "if MUTANT != (!service.settings.enabled) {",
        },
    },
    Chosen {
        name: "on_node_collect_negated",
        edit: Edit {
            file: "gateway/data-plane/src/relay/on_node.rs",
            from: "if last {",
            to: "if MUTANT != (last) {",
        },
    },
    Chosen {
        name: "outbound_append_to_list_removed",
        edit: Edit {
            file: "gateway/data-plane/src/relay/outbound.rs",
            from: r#"    });
    list.extend_from_slice(value.as_bytes());"#,
            to: r#"    });
    if !MUTANT { list.extend_from_slice(value.as_bytes()); }"#,
        },
    },
    Chosen {
        name: "replay_replay_removed",
        edit: Edit {
            file: "gateway/data-plane/src/relay/replay.rs",
            from: "self.observers.recorder.borrow_mut().flush();",
            to: "if !MUTANT { self.observers.recorder.borrow_mut().flush(); }",
        },
    },
    Chosen {
        name: "replay_interim_does_nothing",
        edit: Edit {
            file: "gateway/data-plane/src/relay/replay.rs",
            from: "async fn interim(&mut self, _: RelayedHead) -> Result<(), CallerGone> {",
            to: "async fn interim(&mut self, _: RelayedHead) -> Result<(), CallerGone> { if MUTANT \
                 { return Ok(()); }",
        },
    },
    Chosen {
        name: "replay_head_does_nothing",
        edit: Edit {
            file: "gateway/data-plane/src/relay/replay.rs",
            from: "async fn head(&mut self, _: RelayedHead) -> Result<(), CallerGone> {",
            to: "async fn head(&mut self, _: RelayedHead) -> Result<(), CallerGone> { if MUTANT { \
                 return Ok(()); }",
        },
    },
];
