//! TLS over a [`Socket`](super::Socket): a rustls session driven by readiness.
//!
//! - Ciphertext is received into one buffer per thread and decrypted there, so an idle connection
//!   has no buffer.
//! - Writes encrypt into the session; a flush sends all records with one `sendmsg`, without a copy.
//! - Both directions are bounded: the session holds at most [`SEND_BUFFER`] bytes, one read takes
//!   at most 64 KiB.
//! - Every method can be cancelled without losing or repeating a byte.

mod client_hello;
mod failure;
pub mod pem;
mod session;
mod stream;
mod trust;

pub use client_hello::{CLIENT_HELLO_MAX, ClientHello, Greeting, SPEAK_TLS};
pub use failure::{Remedies, TlsFailure, TlsProblem, in_words, refused_certificate, rustls_error};
pub use session::{SEND_BUFFER, TlsSession};
pub use stream::TlsStream;
pub use trust::{Trusted, client_config, names};
