//! HTTP/1.1 (RFC 9112): message heads, bodies and header rules, without I/O; of HTTP/2 what the h2 crate leaves to check.
//! Both roles: the gateway reads requests and writes responses, the agent the other way round.

pub mod body;
pub mod fields;
pub mod framing;
pub mod head;
mod limits;
pub mod unread;
pub mod upgrade;
mod version;
pub mod write;

pub use body::{BodyDecoder, InvalidBody, Part};
pub use framing::Framing;
pub use head::{HeadScanner, RequestHead, ResponseHead};
pub use limits::{HeadLimits, InvalidHead};
pub use unread::UnreadHead;
pub use upgrade::UpgradeProtocol;
pub use version::Version;
pub use write::Connection;
