//! Detection of peers that are gone.

use super::ending::forget_if_done;
use super::{SEND_TIMEOUT, SocketId, with};
use crate::clock::{self, Nanos};
use crate::{events, network};

/// Ends the connection if bytes in flight are not acknowledged in time.
pub(super) fn watch_acknowledgement(id: SocketId) {
    let watched = with(|sockets, _| {
        let socket = sockets.sockets.get(&id)?;
        let within = match socket.options.user_timeout {
            0 => SEND_TIMEOUT,
            within => within,
        };
        Some((socket.acknowledged, within))
    });
    let Some((acknowledged, within)) = watched else {
        return;
    };
    events::after(within, move || {
        with(|sockets, wakes| {
            if let Some(socket) = sockets.sockets.get_mut(&id)
                && socket.acknowledged == acknowledged
                && socket.in_flight > 0
            {
                socket.breaks(libc::ETIMEDOUT, wakes);
            }
        });
        forget_if_done(id);
    });
}

/// Probes an idle peer (RFC 9293 §3.8.4).
pub(super) fn keep_alive(id: SocketId, after: Nanos) {
    events::after(after, move || {
        let next = with(|sockets, wakes| {
            let socket = sockets.sockets.get_mut(&id)?;
            if socket.is_broken || !socket.options.keep_alive {
                return None;
            }
            let idle = clock::elapsed() - socket.last_heard;
            if idle < socket.options.keep_idle {
                socket.probes_unanswered = 0;
                return Some(socket.options.keep_idle - idle);
            }
            // The probe and its answer take no time here.
            if network::is_cut(socket.local, socket.remote) {
                socket.probes_unanswered += 1;
                if socket.probes_unanswered > socket.options.keep_count {
                    socket.breaks(libc::ETIMEDOUT, wakes);
                    return None;
                }
                return Some(socket.options.keep_interval);
            }
            socket.probes_unanswered = 0;
            socket.last_heard = clock::elapsed();
            Some(socket.options.keep_idle)
        });
        if let Some(next) = next {
            keep_alive(id, next.max(1_000_000));
        }
    });
}
