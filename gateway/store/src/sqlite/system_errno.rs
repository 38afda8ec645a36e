//! The error of the operating system that made SQLite fail.
#![allow(unsafe_code, reason = "rusqlite has no function for it")]

use gw_base::process::reserve;
use rusqlite::ErrorCode::{CannotOpen, SystemIoFailure};
use rusqlite::{Connection, Error, ffi};

/// Whether `error`, the latest of this connection, is for lack of room. SQLite has a code of its
/// own only for a write to a full disk: neither for one beyond a quota, nor for a sync, with which
/// some file systems allocate.
pub(super) fn is_full(connection: &Connection, error: &Error) -> bool {
    let code = error.sqlite_error_code();
    let is_of_file = matches!(code, Some(SystemIoFailure | CannotOpen));
    // SAFETY: the connection is open as long as it is borrowed, and only this thread uses it.
    let errno = unsafe { ffi::sqlite3_system_errno(connection.handle()) };
    is_of_file && reserve::is_full(std::io::Error::from_raw_os_error(errno).kind())
}
