//! Paths between machines: delay, loss of contact, and how the network cuts a stream into pieces.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::clock::{self, Nanos};
use crate::{events, random, trace};

type Action = Box<dyn FnOnce()>;

/// Properties of the path between two machines, the same in both directions.
#[derive(Debug, Clone, Copy)]
pub struct Path {
    /// Time that each segment takes.
    pub delay: Duration,
    /// Most time that a segment takes beyond [`Self::delay`]. Segments of one connection keep their
    /// order.
    pub jitter: Duration,
    /// Most bytes of one segment; each has a size that the seed chooses.
    pub segment: usize,
}

impl Default for Path {
    fn default() -> Self {
        Self {
            delay: Duration::from_micros(50),
            jitter: Duration::from_micros(50),
            segment: 64 * 1024,
        }
    }
}

#[derive(Default)]
struct PathState {
    path: Path,
    is_cut: bool,
    /// What is sent again once the path works.
    held: Vec<Action>,
}

#[derive(Default)]
struct Network {
    paths: BTreeMap<(IpAddr, IpAddr), PathState>,
    default: Path,
}

thread_local! {
    static NETWORK: RefCell<Network> = RefCell::default();
}

fn key(a: IpAddr, b: IpAddr) -> (IpAddr, IpAddr) {
    (a.min(b), a.max(b))
}

/// Sets the properties of all paths without properties of their own.
pub fn set_default(path: Path) {
    NETWORK.with_borrow_mut(|network| network.default = path);
}

/// Sets the properties of the path between two machines.
pub fn set_path(a: IpAddr, b: IpAddr, path: Path) {
    NETWORK.with_borrow_mut(|network| network.paths.entry(key(a, b)).or_default().path = path);
}

/// Cuts the path between two machines, or mends it. While it is cut, segments in either direction
/// are lost, without a word to either end. TCP sends them again, so they arrive after the path is
/// mended.
pub fn cut(a: IpAddr, b: IpAddr, is_cut: bool) {
    let held = NETWORK.with_borrow_mut(|network| {
        let default = network.default;
        let state = network.paths.entry(key(a, b)).or_insert(PathState {
            path: default,
            ..PathState::default()
        });
        state.is_cut = is_cut;
        if is_cut {
            Vec::new()
        } else {
            std::mem::take(&mut state.held)
        }
    });
    trace::line(|line| {
        let what = if is_cut { "cut" } else { "mended" };
        line.push_str(&format!("path {a} - {b} is {what}"));
    });
    for action in held {
        action();
    }
}

/// Whether the path between two machines is cut.
pub(crate) fn is_cut(a: SocketAddr, b: SocketAddr) -> bool {
    NETWORK.with_borrow(|network| {
        let state = network.paths.get(&key(a.ip(), b.ip()));
        state.is_some_and(|state| state.is_cut)
    })
}

fn path(a: SocketAddr, b: SocketAddr) -> Path {
    NETWORK.with_borrow(|network| {
        let state = network.paths.get(&key(a.ip(), b.ip()));
        state.map_or(network.default, |state| state.path)
    })
}

/// Size of the next segment between two ends, at most `most` bytes.
pub(crate) fn segment(a: SocketAddr, b: SocketAddr, most: usize) -> usize {
    let largest = path(a, b).segment.min(most).max(1);
    // Whole segments half of the time: small messages mostly arrive in one piece.
    if random::per_mille(500) {
        largest
    } else {
        usize::try_from(random::between(1..=largest as u64)).unwrap_or(largest)
    }
}

/// Runs `action` once a segment from `from` has arrived at `to`, after `earliest`. Returns that
/// time, unless the path is cut.
pub(crate) fn carry(
    from: SocketAddr,
    to: SocketAddr,
    earliest: Nanos,
    action: impl FnOnce() + 'static,
) -> Nanos {
    let path = path(from, to);
    let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(0);
    let delay = nanos(path.delay) + random::between(0..=nanos(path.jitter));
    let time = (clock::elapsed() + delay).max(earliest + 1);
    events::at(time, move || {
        let mut action = Some(Box::new(action) as Action);
        NETWORK.with_borrow_mut(|network| {
            let state = network.paths.get_mut(&key(from.ip(), to.ip()));
            if let Some(state) = state.filter(|state| state.is_cut) {
                state.held.extend(action.take());
            }
        });
        if let Some(action) = action {
            action();
        }
    });
    time
}

pub(crate) fn clear() {
    drop(NETWORK.take());
}
