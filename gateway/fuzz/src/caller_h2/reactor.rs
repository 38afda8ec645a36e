//! The thread on which connections are served. A reactor is never freed, so all inputs use one.

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;

use futures_util::FutureExt;
use gw_shared::runtime::Driver;

/// Sends inputs to the thread, and receives how they ended.
struct Reactor {
    inputs: Sender<Vec<u8>>,
    ended: Receiver<thread::Result<()>>,
}

static REACTOR: LazyLock<Mutex<Reactor>> = LazyLock::new(|| {
    let (inputs, waiting) = channel();
    let (end, ended) = channel();
    let run = move || {
        let driver = Driver::choose().expect("a driver");
        driver.block_on(serve(waiting, end)).expect("a reactor");
    };
    thread::Builder::new().spawn(run).expect("a thread");
    Mutex::new(Reactor { inputs, ended })
});

/// Runs inputs, one after another. Blocks the reactor between two of them, when nothing runs on it.
async fn serve(inputs: Receiver<Vec<u8>>, ended: Sender<thread::Result<()>>) {
    for input in inputs {
        let connection = AssertUnwindSafe(super::connection(&input));
        if ended.send(connection.catch_unwind().await).is_err() {
            return;
        }
    }
}

/// Runs an input. Panics as it does.
pub(super) fn run(data: &[u8]) {
    let ended = {
        let reactor = REACTOR.lock().unwrap_or_else(PoisonError::into_inner);
        reactor.inputs.send(data.to_vec()).expect("the thread runs");
        reactor.ended.recv().expect("the thread runs")
    };
    if let Err(panic) = ended {
        resume_unwind(panic);
    }
}
