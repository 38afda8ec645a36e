//! Tasks of the control plane: the admin listener, the control planes of other nodes, and the jobs
//! of workers.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use crate::limits;
use gw_base::tls::admin::AdminTls;
use gw_control_plane::admin::{self, Admin};
use gw_control_plane::certificates;
use gw_control_plane::cluster::{self, ServerLimits};
use gw_control_plane::control::changes::audit;
use gw_control_plane::control::{Control, usage};
use gw_control_plane::{control, members};
use gw_telemetry::request_log::RequestLog;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::gateway::{Gateway, StartError};
use super::sockets::listeners::ListenError;
use super::{apex_nodes, spliced_tunnels};

/// Longest wait for running requests when the control plane stops.
const REQUESTS_END_WITHIN: Duration = Duration::from_secs(2);

/// Keeps heads of the audit log in the archive of the request log, if there is one.
pub(super) fn archive_audit_heads(control: &Arc<Control>, log: &RequestLog) {
    let Some(archive) = log.archive() else {
        return;
    };
    // Weak: the archive stops after the control plane.
    let control = Arc::downgrade(control);
    archive.keep_audit_heads(move || {
        let control = control.upgrade()?;
        Some(audit::head(&control)?.to_string())
    });
}

impl Gateway {
    /// Serves what the workers ask of the control plane, and maintains the records.
    pub(super) fn serve_jobs(&self) {
        let control = Arc::clone(&self.control);
        let jobs = Arc::clone(&self.jobs);
        let tasks = self.tasks.control_plane.clone();
        control::maintain(&control, &tasks);
        usage::keep(&control, &self.series, &tasks);
        self.tasks
            .control_plane
            .spawn("the jobs of the workers", async move {
                jobs.lock().await.serve(&control, &tasks).await;
            });
    }

    /// Serves the admin listener, and the control planes of other nodes.
    pub(super) fn serve_administration(&mut self) -> Result<(), StartError> {
        let Some(listeners) = &self.listeners else {
            return Ok(());
        };
        let listener = listeners.admin.try_clone().map_err(ListenError::from)?;
        let tls = self.control.admin_tls().cloned();
        let control = Arc::clone(&self.control);
        let request_log = Arc::clone(&self.request_log);
        let spans = self.span_counts().cloned();
        let series = Arc::clone(&self.series);
        let draining = Arc::clone(&self.drain.begun);
        let region = self
            .node
            .members
            .as_ref()
            .map(|members| members.inputs().clone());
        let admin = Admin::new(
            control,
            request_log,
            spans,
            series,
            draining,
            region,
            self.addresses.callers.port(),
        );
        self.serve_nodes(&admin);
        let acme = self.node.acme.as_ref();
        let answers_http = self.addresses.plain.is_some();
        certificates::keep(&admin, acme, answers_http, &self.tasks.control_plane);
        let stopping = self.tasks.control_plane.stopping().clone();
        let serving = serve_admin(listener, tls, admin, stopping);
        self.tasks
            .control_plane
            .spawn("the admin listener", serving);
        Ok(())
    }

    fn serve_nodes(&self, admin: &Admin) {
        let Some(waiting) = self.node.waiting.clone() else {
            return;
        };
        let limits = apex_nodes::routes(self.handles.clone(), self.control.workers());
        let spliced = spliced_tunnels::routes(Arc::clone(&self.handles));
        let node = Arc::clone(self.control.local_node());
        let router = admin::between_nodes(admin.clone())
            .merge(limits)
            .merge(spliced);
        let mut router = cluster::for_nodes(router, Arc::clone(&node));
        if let Some(members) = &self.node.members {
            // Also for nodes that are not known here yet: they tell of themselves.
            router = router.merge(members::routes(
                members.inputs().clone(),
                Arc::clone(&self.control),
            ));
        }
        let stopping = self.tasks.control_plane.stopping().clone();
        self.tasks
            .control_plane
            .spawn("the server for other nodes", async move {
                let mut waiting = waiting.lock().await;
                let limits = ServerLimits::default();
                let stopped = stopping.cancelled();
                let serving = cluster::serve(&mut waiting, node, router, limits, stopped);
                within_time(&stopping, serving).await;
            });
    }

    /// Finishes the running jobs and requests, and closes the store. Later jobs wait.
    pub(super) fn pause_control_plane(&mut self) {
        self.tasks.control_plane.stop(limits::CONTROL_PLANE_END);
        self.tasks.control_plane = self.tasks.control_plane.sibling();
        self.control.close_store();
    }
}

/// Serves the admin listener until `stopping` is cancelled, and then finishes running requests.
async fn serve_admin(
    listener: TcpListener,
    tls: Option<Arc<AdminTls>>,
    admin: Admin,
    stopping: CancellationToken,
) {
    let serving = admin::serve(listener, tls, admin, stopping.cancelled());
    if let Some(Err(error)) = within_time(&stopping, serving).await {
        tracing::error!(%error, "the admin listener failed");
    }
}

/// Runs `serving` to its end, or until it took too long after `stopping` was cancelled.
async fn within_time<T>(
    stopping: &CancellationToken,
    serving: impl Future<Output = T>,
) -> Option<T> {
    tokio::select! {
        served = serving => Some(served),
        () = async {
            stopping.cancelled().await;
            sleep(REQUESTS_END_WITHIN).await;
        } => None,
    }
}
