//! Threads of the process.

use std::io;
use std::thread::JoinHandle;

pub(super) fn spawn<T: Send + 'static>(
    name: String,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    std::thread::Builder::new().name(name).spawn(run)
}

pub(super) fn joined<T>(thread: JoinHandle<T>) -> Option<T> {
    let ended = thread.join();
    if ended.is_err() {
        tracing::error!("a thread panicked");
    }
    ended.ok()
}
