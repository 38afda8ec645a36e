//! Threads of the control plane: the admin listener, the control planes of other nodes, and the jobs of workers.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use futures_util::FutureExt;
use tokio::sync::oneshot;

use super::gateway::{Gateway, StartError};
use super::listeners::ListenError;
use super::spliced_tunnels;
use super::threads::{joined, spawn};
use crate::admin::{self, Admin};
use crate::apex;
use crate::cluster::{self, LocalNode, ServerLimits, WaitingConnections};
use crate::control::JobQueue;
use crate::members;
use crate::tls::admin::AdminTls;

/// Longest wait for running requests when the control plane stops.
const REQUESTS_END_WITHIN: Duration = Duration::from_secs(2);

/// The thread that serves the admin listener. It ends when `stop` is dropped.
pub(super) struct AdminThread {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

/// The thread that serves the control planes of other nodes. It ends when `stop` is dropped, and returns the connections
/// that still wait.
pub(super) struct NodesThread {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<WaitingConnections>,
}

impl Gateway {
    pub(super) fn serve_jobs(&mut self, jobs: JobQueue) -> Result<(), StartError> {
        let control = Arc::clone(&self.control);
        self.jobs = Some(
            spawn("gw-executor".to_owned(), move || jobs.serve(&control))
                .map_err(StartError::Thread)?,
        );
        Ok(())
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
        let draining = Arc::clone(&self.draining);
        let region = self
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
            self.address.port(),
        );
        self.serve_nodes(&admin)?;
        let (stop, stopped) = oneshot::channel();
        let thread = spawn("gw-control".to_owned(), move || {
            serve_admin(listener, tls, admin, stopped)
        });
        let thread = thread.map_err(StartError::Thread)?;
        self.admin = Some(AdminThread { stop, thread });
        Ok(())
    }

    fn serve_nodes(&mut self, admin: &Admin) -> Result<(), StartError> {
        let Some(waiting) = self.waiting_nodes.take() else {
            return Ok(());
        };
        let limits = apex::routes_between_nodes(self.peers.clone(), self.control.workers());
        let spliced = spliced_tunnels::routes(Arc::clone(&self.peers));
        let node = Arc::clone(self.control.local_node());
        let router = admin::between_nodes(admin.clone())
            .merge(limits)
            .merge(spliced);
        let mut router = cluster::for_nodes(router, Arc::clone(&node));
        if let Some(members) = &self.members {
            // Also for nodes that are not known here yet: they tell of themselves.
            router = router.merge(members::routes(
                members.inputs().clone(),
                Arc::clone(&self.control),
            ));
        }
        let (stop, stopped) = oneshot::channel();
        let thread = spawn("gw-nodes".to_owned(), move || {
            serve_nodes(waiting, node, router, stopped)
        });
        let thread = thread.map_err(StartError::Thread)?;
        self.nodes = Some(NodesThread { stop, thread });
        Ok(())
    }

    /// Finishes the running job and closes the store. Later jobs wait.
    pub(super) fn pause_control_plane(&mut self) -> Option<JobQueue> {
        if let Some(admin) = self.admin.take() {
            admin.stop();
        }
        if let Some(nodes) = self.nodes.take() {
            self.waiting_nodes = nodes.stop();
        }
        self.executor.close();
        let jobs = self.jobs.take().and_then(joined);
        self.control.close_store();
        jobs
    }
}

impl AdminThread {
    pub(super) fn stop(self) {
        drop(self.stop);
        joined(self.thread);
    }
}

impl NodesThread {
    pub(super) fn stop(self) -> Option<WaitingConnections> {
        drop(self.stop);
        joined(self.thread)
    }
}

/// Serves the admin listener until `stopped` resolves, and then finishes running requests.
fn serve_admin(
    listener: TcpListener,
    tls: Option<Arc<AdminTls>>,
    admin: Admin,
    stopped: oneshot::Receiver<()>,
) {
    let stopped = stopped.map(drop).shared();
    let served = run_until(stopped.clone(), async {
        admin::serve(listener, tls, admin, stopped).await
    });
    if let Err(error) = served.and_then(Option::transpose) {
        tracing::error!(%error, "the admin listener failed");
    }
}

/// Serves the control planes of other nodes until `stopped` resolves, and then finishes running requests.
fn serve_nodes(
    mut waiting: WaitingConnections,
    node: Arc<LocalNode>,
    router: Router,
    stopped: oneshot::Receiver<()>,
) -> WaitingConnections {
    let stopped = stopped.map(drop).shared();
    let serving = cluster::serve(
        &mut waiting,
        node,
        router,
        ServerLimits::default(),
        stopped.clone(),
    );
    if let Err(error) = run_until(stopped.clone(), serving) {
        tracing::error!(%error, "cannot serve the control planes of other nodes");
    }
    waiting
}

/// Runs `serving` to its end, or until it took too long after `stopped`.
fn run_until<T>(
    stopped: impl Future<Output = ()>,
    serving: impl Future<Output = T>,
) -> io::Result<Option<T>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    Ok(runtime.block_on(async {
        let too_late = async {
            stopped.await;
            tokio::time::sleep(REQUESTS_END_WITHIN).await;
        };
        tokio::select! {
            served = serving => Some(served),
            () = too_late => None,
        }
    }))
}
