//! TLS over a [`Socket`]: a rustls session driven by readiness.
//!
//! - Ciphertext is received into one scratch buffer per thread and decrypted at once; a connection that waits owns none.
//! - Writers encrypt straight into the session; a flush sends every record of the turn in one `sendmsg`, from where
//!   they lie.
//! - Both directions are bounded: the session takes at most [`SEND_BUFFER`] bytes, one read at most 64 KiB.
//! - Every method can be cancelled without losing or repeating a byte.

mod client_hello;
mod stream;

pub use client_hello::{CLIENT_HELLO_MAX, ClientHello, Greeting, SPEAK_TLS};
pub use stream::{SEND_BUFFER, TlsStream};
