//! Options of setsockopt(2).

use libc::c_int;

use super::watch::keep_alive;
use super::{BUFFER_LEAST, Result, with};
use crate::clock::Nanos;

/// An option of setsockopt(2). Times are in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Setting {
    UnsentLimit(usize),
    UserTimeout(Nanos),
    KeepAlive(bool),
    KeepIdle(Nanos),
    KeepInterval(Nanos),
    KeepCount(u64),
    Linger(Option<Nanos>),
    SendBuffer(usize),
    ReceiveBuffer(usize),
    /// Accepted, without an effect here.
    Other,
}

pub(crate) fn set_option(fd: c_int, option: Setting) -> Result<()> {
    let probe = with(|sockets, wakes| {
        let id = sockets.id(fd)?;
        let socket = sockets.of(fd)?;
        let options = &mut socket.options;
        match option {
            Setting::UnsentLimit(bytes) => options.unsent_limit = bytes,
            Setting::UserTimeout(time) => options.user_timeout = time,
            Setting::KeepAlive(on) => options.keep_alive = on,
            Setting::KeepIdle(time) => {
                options.keep_idle = time;
                let begins = options.keep_alive && !options.is_probed;
                options.is_probed |= begins;
                return Result::Ok(begins.then_some((id, time)));
            }
            Setting::KeepInterval(time) => options.keep_interval = time,
            Setting::KeepCount(count) => options.keep_count = count,
            Setting::Linger(time) => options.resets_on_close = time == Some(0),
            Setting::SendBuffer(bytes) => socket.send_limit = (bytes * 2).max(BUFFER_LEAST),
            Setting::ReceiveBuffer(bytes) => socket.receive_limit = (bytes * 2).max(BUFFER_LEAST),
            Setting::Other => {}
        }
        socket.wake_ready(wakes);
        Ok(None)
    })?;
    if let Some((id, idle)) = probe {
        keep_alive(id, idle.max(1_000_000));
    }
    Ok(())
}
