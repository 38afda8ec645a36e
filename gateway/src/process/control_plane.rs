//! Threads of the control plane: the admin listener, and the jobs of workers.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::oneshot;

use super::gateway::{Gateway, StartError};
use super::listeners::ListenError;
use super::threads::{joined, spawn};
use crate::admin::{self, Admin};
use crate::control::JobQueue;

/// Longest wait for running administration requests when the admin listener stops.
const ADMIN_ENDS_WITHIN: Duration = Duration::from_secs(2);

/// The thread that serves the admin listener. It ends when `stop` is dropped.
pub(super) struct AdminThread {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Gateway {
    pub(super) fn serve_jobs(&mut self, jobs: JobQueue) -> Result<(), StartError> {
        let control = Arc::clone(&self.control);
        self.jobs = Some(spawn("gw-executor".to_owned(), move || jobs.serve(&control)).map_err(StartError::Thread)?);
        Ok(())
    }

    pub(super) fn serve_admin(&mut self) -> Result<(), StartError> {
        let Some(listeners) = &self.listeners else { return Ok(()) };
        let listener = listeners.admin.try_clone().map_err(ListenError::from)?;
        let (control, request_log) = (Arc::clone(&self.control), Arc::clone(&self.request_log));
        let (spans, series) = (self.span_counts().cloned(), Arc::clone(&self.series));
        let draining = Arc::clone(&self.draining);
        let admin = Admin::new(control, request_log, spans, series, draining, self.address.port());
        let (stop, stopped) = oneshot::channel();
        let thread = spawn("gw-control".to_owned(), move || serve_admin(listener, admin, stopped));
        let thread = thread.map_err(StartError::Thread)?;
        self.admin = Some(AdminThread { stop, thread });
        Ok(())
    }

    /// Finishes the running job and closes the store. Later jobs wait.
    pub(super) fn pause_control_plane(&mut self) -> Option<JobQueue> {
        if let Some(admin) = self.admin.take() {
            admin.stop();
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

/// Serves the admin listener until `stopped` resolves, and then finishes running requests.
fn serve_admin(listener: TcpListener, admin: Admin, stopped: oneshot::Receiver<()>) {
    let stopped = stopped.map(drop).shared();
    let served = tokio::runtime::Builder::new_current_thread().enable_all().build().and_then(|control| {
        control.block_on(async {
            let too_late = async {
                stopped.clone().await;
                tokio::time::sleep(ADMIN_ENDS_WITHIN).await;
            };
            tokio::select! {
                served = admin::serve(listener, admin, stopped.clone()) => served,
                () = too_late => Ok(()),
            }
        })
    });
    if let Err(error) = served {
        tracing::error!(%error, "the admin listener failed");
    }
}
