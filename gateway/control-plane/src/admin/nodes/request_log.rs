//! The request logs of all nodes. A request is in the log of the node that received it, whose slot
//! is in the request's id.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use gw_base::page::{self, Page};
use gw_region::{Member, NodeSlot};
use gw_shared::id::RequestId;
use gw_store::AuditHead;
use gw_telemetry::request_log::archive::{Archive, ArchiveError};
use gw_telemetry::request_log::{
    BodyView, CapturedRequest, RequestPage, RequestView, SearchQuery, Side,
};

use super::ask::{LOG_WITHIN, target};
use super::merge::merge;
use super::serve::{WireBody, WireCaptured};
use crate::admin::{Admin, NoResult};
use crate::cluster::UnavailableNode;
use crate::control::changes::audit;
use crate::control::{Actor, Control, ControlError};

/// Longest time for all reads of the archive for one answer.
const ARCHIVE_WITHIN: Duration = Duration::from_secs(5);

/// A request, and where its record is.
pub(in crate::admin) struct Located {
    pub(in crate::admin) view: RequestView,
    id: RequestId,
    place: RecordPlace,
}

impl Located {
    fn new(view: RequestView, id: RequestId, place: RecordPlace) -> Self {
        Self { view, id, place }
    }
}

/// Where the record of a request is.
enum RecordPlace {
    Here,
    Node(Member),
    /// In the archive, as the node in this slot recorded it. Further reads of it end at this time,
    /// too.
    Archive(NodeSlot, Instant),
}

impl Admin {
    /// Finds a request at any node, or in the archive; `None` if it is in no log. Fails if the node
    /// that received it does not answer and the archive does not have it.
    ///
    /// A node that has started again in another slot still has the requests of its old slot. Hence
    /// this node looks into its own log first, and asks all nodes before it says that there is no
    /// such request.
    pub(in crate::admin) async fn locate(
        &self,
        id: RequestId,
    ) -> Result<Option<Located>, NoResult> {
        if let Some(view) = self.read_log(move |log| log.show(id)).await? {
            return Ok(Some(Located::new(view, id, RecordPlace::Here)));
        }
        let Some(placement) = self.control.local_node().placement() else {
            return Ok(None);
        };
        if !self.request_log.keeps(id) {
            return Ok(None);
        }
        let path = format!("/v1/requests/{id}");
        let slot = id.node_slot();
        let mut rest: Vec<Member> = placement.others().cloned().collect();
        let mut missing = Vec::new();
        if slot != placement.here().get() {
            let at = rest.iter().position(|node| node.slot.get() == slot);
            match at.map(|at| rest.swap_remove(at)) {
                None => missing.push(UnavailableNode {
                    slot,
                    reason: "is not a member of the region".to_owned(),
                }),
                Some(node) => match self.ask_node(&node, &path, LOG_WITHIN).await {
                    Ok(Some(view)) => {
                        return Ok(Some(Located::new(view, id, RecordPlace::Node(node))));
                    }
                    Ok(None) => {}
                    Err(unavailable) => missing.push(unavailable),
                },
            }
        }
        let answers = join_all(
            rest.iter()
                .map(|node| self.ask_node(node, &path, LOG_WITHIN)),
        )
        .await;
        for (node, answer) in rest.into_iter().zip(answers) {
            if let Ok(Some(view)) = answer {
                return Ok(Some(Located::new(view, id, RecordPlace::Node(node))));
            }
        }
        let until = Instant::now() + ARCHIVE_WITHIN;
        // Also if a node has the slot: it may have another one's, which was lost and removed.
        if let Some(slot) = NodeSlot::new(slot)
            && let Some(view) = self
                .read_archive(until, move |archive| archive.show(slot, id))
                .await?
                .flatten()
        {
            let place = RecordPlace::Archive(slot, until);
            return Ok(Some(Located::new(view, id, place)));
        }
        if missing.is_empty() {
            return Ok(None);
        }
        // The last records of a lost node may not be in the archive.
        Err(ControlError::NodesUnavailable(missing).into())
    }

    /// Runs a read of the archive on a blocking thread, until a time. `None` without an archive.
    async fn read_archive<T: Send + 'static>(
        &self,
        until: Instant,
        read: impl FnOnce(&Archive) -> Result<T, ArchiveError> + Send + 'static,
    ) -> Result<Option<T>, NoResult> {
        let Some(archive) = self.request_log.archive().cloned() else {
            return Ok(None);
        };
        let read = self
            .clone()
            .run(move |_| read(&archive.until(until)))
            .await?;
        read.map(Some).map_err(|error| {
            tracing::warn!(%error, "cannot read the log of a lost node in the archive");
            ControlError::ArchiveUnavailable(error.to_string()).into()
        })
    }

    /// The heads of the audit log in the archive, or why they cannot be read. None without an
    /// archive.
    pub(in crate::admin) async fn archived_audit_heads(
        &self,
    ) -> Result<Result<Vec<AuditHead>, String>, NoResult> {
        let Some(archive) = self.request_log.archive().cloned() else {
            return Ok(Ok(Vec::new()));
        };
        let read = self.clone().run(move |_| archive.audit_heads()).await?;
        Ok(read.map_err(|error| error.to_string()).and_then(|heads| {
            let parse = |head: &String| head.parse::<AuditHead>();
            let heads: Result<_, _> = heads.iter().map(parse).collect();
            heads.map_err(|error| format!("archive: a head of the audit log {error}"))
        }))
    }

    /// Reads a captured body for the administrator, after an entry in the audit log. The entry is
    /// made by the node that the administrator asked, wherever the body is.
    pub(in crate::admin) async fn read_body(
        &self,
        request: &Located,
        side: Side,
    ) -> Result<Option<BodyView>, NoResult> {
        let body = self.recorded_body(request, side).await?;
        if body.is_some() {
            let view = request.view.clone();
            let note =
                move |control: &Control| audit::note_body_read(control, &Actor::Admin, &view, side);
            self.clone().run(note).await??;
        }
        Ok(body)
    }

    /// Reads a captured body without an entry in the audit log, because it is not shown.
    pub(in crate::admin) async fn recorded_body(
        &self,
        request: &Located,
        side: Side,
    ) -> Result<Option<BodyView>, NoResult> {
        let id = request.id;
        let node = match &request.place {
            RecordPlace::Here => return self.read_log(move |log| log.body(id, side)).await,
            RecordPlace::Archive(slot, until) => {
                let slot = *slot;
                let read = self.read_archive(*until, move |archive| archive.body(slot, id, side));
                return Ok(read.await?.flatten());
            }
            RecordPlace::Node(node) => node,
        };
        let path = format!("/v1/requests/{id}/body/{}", side.as_str());
        let body: Option<WireBody> = self
            .ask_node(node, &path, LOG_WITHIN)
            .await
            .map_err(unavailable)?;
        body.map(|body| BodyView::try_from(body).map_err(|invalid| unavailable(invalid.of(node))))
            .transpose()
    }

    /// Reads a request with its captured message, from any node.
    pub(in crate::admin) async fn captured(
        &self,
        id: RequestId,
    ) -> Result<Option<CapturedRequest>, NoResult> {
        let Some(request) = self.locate(id).await? else {
            return Ok(None);
        };
        let node = match &request.place {
            RecordPlace::Here => return self.read_log(move |log| log.captured(id)).await,
            RecordPlace::Archive(slot, until) => {
                let slot = *slot;
                let read = self.read_archive(*until, move |archive| archive.captured(slot, id));
                return Ok(read.await?.flatten());
            }
            RecordPlace::Node(node) => node,
        };
        let path = format!("/v1/requests/{id}/captured");
        let captured: Option<WireCaptured> = self
            .ask_node(node, &path, LOG_WITHIN)
            .await
            .map_err(unavailable)?;
        captured
            .map(|kept| {
                CapturedRequest::try_from(kept).map_err(|invalid| unavailable(invalid.of(node)))
            })
            .transpose()
    }

    /// Searches the archived logs of nodes that are no members.
    async fn search_archive(
        &self,
        query: Arc<SearchQuery>,
    ) -> Result<Vec<Page<RequestView>>, NoResult> {
        let Some(placement) = self.control.local_node().placement() else {
            return Ok(Vec::new());
        };
        let search = move |archive: &Archive| {
            let is_gone =
                |slot: &NodeSlot| *slot != placement.here() && placement.member(*slot).is_none();
            archive
                .nodes()?
                .into_iter()
                .filter(is_gone)
                .map(|slot| archive.search(slot, &query))
                .collect()
        };
        let until = Instant::now() + ARCHIVE_WITHIN;
        Ok(self.read_archive(until, search).await?.unwrap_or_default())
    }

    /// Searches the logs of all nodes, and those of lost nodes in the archive, the newest request
    /// first. A page may be short or empty and still have a next one.
    pub(in crate::admin) async fn search(
        &self,
        query: SearchQuery,
    ) -> Result<RequestPage, NoResult> {
        let limit = page::checked_limit(query.limit).map_err(ControlError::from)?;
        let nodes = self.other_nodes();
        let target = target("/v1/requests", &query);
        let query = Arc::new(query);
        let asked = Arc::clone(&query);
        let here = self.read_log(move |log| log.search(&asked));
        let others = self.ask_nodes::<Page<RequestView>>(&nodes, &target, LOG_WITHIN);
        let (here, (mut pages, missing), archived) =
            tokio::join!(here, others, self.search_archive(Arc::clone(&query)));
        pages.push(here?);
        let is_partial = query.partial == Some(true);
        let missing_archive = is_partial && matches!(archived, Err(NoResult::Refused(_)));
        if !missing_archive {
            pages.extend(archived?);
        }
        if !missing.is_empty() && !is_partial {
            return Err(ControlError::NodesUnavailable(missing).into());
        }
        let Page { items, next_cursor } = merge(pages, limit);
        Ok(RequestPage {
            items,
            next_cursor,
            missing_nodes: missing.iter().map(|node| node.slot).collect(),
            missing_archive,
        })
    }
}

fn unavailable(node: UnavailableNode) -> NoResult {
    ControlError::NodesUnavailable(vec![node]).into()
}
