//! The audit log: its entries, and the entries for reads and replays of captured requests, which
//! may hold personal data.

use gw_base::clock::Timestamp;
use gw_base::page::Page;
use gw_shared::id::AccountId;
use gw_shared::identity::program::SignedProgram;
use gw_store::{
    AuditCheck, AuditEntry, AuditFindings, AuditHead, AuditQuery, NumberedEntry, StoreError,
};
use gw_telemetry::request_log::{RequestView, Side};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::change::COMMIT_ATTEMPTS;
use crate::control::{Actor, Control, ControlError, ReplayEdits, backup};

/// Entries that are checked at once. Changes wait meanwhile.
const PAGE: usize = 1_000;

/// One change: its actor, object and time.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = AuditEntry)]
pub struct AuditEntryView {
    /// Number of the entry. Later entries have higher numbers.
    pub number: i64,
    /// Time of the change, RFC 3339.
    #[schema(format = DateTime)]
    pub at: String,
    /// `admin`, `gateway`, `agent …` or `enrollment-token …`
    pub actor: String,
    /// For example `service.create`.
    pub action: String,
    /// Account that the target belongs to, if any.
    pub account: Option<String>,
    /// Identity of the changed record.
    pub target: String,
    /// The requested values.
    pub detail: serde_json::Value,
    /// SHA-256 of the entry and of the hash of the entry before, in hexadecimal.
    pub hash: String,
}

/// Result of a check of the chain of the audit log.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = AuditVerification)]
pub struct AuditVerificationView {
    /// Whether each entry follows the one before it, and every head that was compared is in the
    /// log.
    pub valid: bool,
    /// Number of entries.
    pub entries: u64,
    /// The newest entry as `NUMBER:HASH`. It vouches for all entries before it.
    pub head: Option<String>,
    /// Number of heads that were compared: those that were given, and those of the archive.
    pub compared_heads: usize,
    /// Why the heads in the archive could not be read; `null` if they were, and without an archive.
    pub archive_error: Option<String>,
    /// Number of problems.
    pub problem_count: u64,
    /// The first of them, the newest entry first.
    pub problems: Vec<AuditProblemView>,
}

/// Entry of the audit log that is not as a gateway has written it.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = AuditProblem)]
pub struct AuditProblemView {
    /// Number of the entry.
    pub number: i64,
    /// Description of the problem.
    pub problem: String,
}

impl AuditVerificationView {
    pub(crate) fn new(findings: AuditFindings, archive_error: Option<String>) -> Self {
        let problems = findings.problems.into_iter();
        Self {
            valid: findings.count == 0,
            entries: findings.entries,
            head: findings.head.map(|head| head.to_string()),
            compared_heads: findings.noted,
            archive_error,
            problem_count: findings.count,
            problems: problems
                .map(|(number, problem)| AuditProblemView {
                    number,
                    problem: problem.to_owned(),
                })
                .collect(),
        }
    }
}

impl From<NumberedEntry> for AuditEntryView {
    fn from(numbered: NumberedEntry) -> Self {
        let NumberedEntry {
            number,
            entry,
            hash,
            ..
        } = numbered;
        let AuditEntry {
            at,
            actor,
            action,
            account,
            target,
            detail,
        } = entry;
        let at = at.to_string();
        let action = action.into_owned();
        let account = account.map(String::from);
        Self {
            number,
            at,
            actor,
            action,
            account,
            target,
            detail,
            hash: hash.to_string(),
        }
    }
}

/// Checks the chain of the audit log up to the newest entry, and compares it with heads that were
/// noted before. Changes go on meanwhile.
pub fn verify(
    control: &Control,
    noted: impl IntoIterator<Item = AuditHead>,
) -> Result<AuditFindings, ControlError> {
    let mut check = AuditCheck::new(noted);
    let newest = control.position().revision;
    let mut before = newest.0.saturating_add(1);
    loop {
        let page = backup::audit_before(control, before, PAGE)?;
        let Some(oldest) = page.last() else {
            return Ok(check.finish(newest));
        };
        before = oldest.number;
        check.add(page);
    }
}

/// The newest entry; `None` if there is none, or the store does not answer, which is logged.
pub fn head(control: &Control) -> Option<AuditHead> {
    match backup::audit_before(control, i64::MAX, 1) {
        Ok(page) => page.first().map(NumberedEntry::head),
        Err(error) => {
            tracing::debug!(%error, "the head of the audit log cannot be read for the archive");
            None
        }
    }
}

/// A page of the audit log, the newest entry first. The cursor is the number of the page's last
/// entry.
pub fn list(control: &Control, query: &AuditQuery) -> Result<Page<AuditEntryView>, ControlError> {
    // One more entry than the page has tells whether another page follows.
    let one_more = AuditQuery {
        limit: query.limit.saturating_add(1),
        ..query.clone()
    };
    let mut entries = control
        .store()
        .as_mut()
        .ok_or(ControlError::HandedOver)?
        .audit_log(&one_more)?;
    let has_more = entries.len() > query.limit;
    entries.truncate(query.limit);
    let next_cursor = entries
        .last()
        .filter(|_| has_more)
        .map(|last| last.number.to_string());
    Ok(Page {
        items: entries.into_iter().map(AuditEntryView::from).collect(),
        next_cursor,
    })
}

/// Records in the audit log that a captured body of `request` is read. Must be called before the
/// body is returned.
pub(crate) fn note_body_read(
    control: &Control,
    actor: &Actor,
    request: &RequestView,
    side: Side,
) -> Result<(), ControlError> {
    note_request(
        control,
        actor,
        "request.read_body",
        request,
        json!({ "body": side }),
    )
}

/// Records a replay of `request` in the audit log, with the names of the edited parts.
pub(crate) fn note_replay(
    control: &Control,
    actor: &Actor,
    request: &RequestView,
    edits: &ReplayEdits,
) -> Result<(), ControlError> {
    let edited = [
        ("method", edits.method.is_some()),
        ("target", edits.target.is_some()),
        (
            "headers",
            edits.headers.is_some() || !edits.set_headers.is_empty(),
        ),
        ("body", edits.body.is_some() || edits.body_base64.is_some()),
    ];
    let edited: Vec<&str> = edited
        .into_iter()
        .filter_map(|(name, is_edited)| is_edited.then_some(name))
        .collect();
    note_request(
        control,
        actor,
        "request.replay",
        request,
        json!({ "body": Side::Request, "edited": edited }),
    )
}

/// Records in the audit log that this gateway offers older programs to agents in place of newer
/// ones. A failure is logged.
pub fn note_roll_backs<'a>(control: &Control, programs: impl Iterator<Item = &'a SignedProgram>) {
    for program in programs {
        let SignedProgram {
            version,
            target,
            sha256,
            replaces,
            ..
        } = program;
        let noted = note(
            control,
            &Actor::Gateway,
            "agent_program.roll_back",
            None,
            version.to_string(),
            json!({ "target": target, "sha256": sha256, "replaces": replaces }),
        );
        if let Err(error) = noted {
            tracing::error!(%version, platform = target, %error,
                "the roll-back of agents is not in the audit log");
        }
    }
}

fn note_request(
    control: &Control,
    actor: &Actor,
    action: &'static str,
    request: &RequestView,
    detail: serde_json::Value,
) -> Result<(), ControlError> {
    note(
        control,
        actor,
        action,
        AccountId::new(&request.account).ok(),
        request.id.clone(),
        detail,
    )
}

/// Adds an entry to the audit log about something that changes no record.
pub(crate) fn note(
    control: &Control,
    actor: &Actor,
    action: &'static str,
    account: Option<AccountId>,
    target: String,
    detail: serde_json::Value,
) -> Result<(), ControlError> {
    let at = Timestamp::now();
    let entry = AuditEntry {
        at,
        actor: actor.to_string(),
        action: action.into(),
        account,
        target,
        detail,
    };
    let mut store = control.store();
    for _ in 0..COMMIT_ATTEMPTS {
        let after = control.position();
        if let Some(position) = control.commit(&mut store, &after, &[], &entry)? {
            tracing::info!(
                actor = entry.actor,
                action,
                object = entry.target,
                "audited"
            );
            control.apply(&after, vec![(position, Vec::new())]);
            return Ok(());
        }
    }
    Err(StoreError::Stale.into())
}
