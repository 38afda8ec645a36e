//! `/backup`

use std::io::{self, BufWriter, Write};
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use tokio::sync::{mpsc, oneshot};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::problem::{Problem, ReadProblems, WriteProblems};
use crate::admin::{Admin, NoResult, Panicked};
use crate::backup;
use crate::control::ControlError;

/// Bytes of one chunk of the response.
const CHUNK: usize = 64 * 1024;
/// Chunks that wait for the client.
const CHUNKS: usize = 4;

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new().routes(routes!(make_backup))
}

/// Make a backup: a tar archive compressed with zstd, of the database as of one change, the
/// certificate authorities and this admin token. It has private keys. The audit log has an entry of
/// it. One backup is made at a time. Not in a region on PostgreSQL, whose database is backed up.
#[utoipa::path(
    get, path = "/backup", tag = "backup",
    responses(
        (
            status = 200,
            description = "The archive",
            body = Vec<u8>,
            content_type = "application/zstd",
        ),
        ReadProblems, WriteProblems,
    ),
)]
async fn make_backup(State(admin): State<Admin>) -> Result<Response, Problem> {
    let permit = Arc::clone(&admin.backups).try_acquire_owned();
    let permit = permit.map_err(|_| {
        ControlError::Conflict("another backup is being made; try again later".to_owned())
    })?;
    let (chunks, received) = mpsc::channel(CHUNKS);
    let (reply, prepared) = oneshot::channel();
    tokio::task::spawn_blocking(move || {
        match backup::of_running(&admin.control, &|| chunks.is_closed()) {
            Ok(prepared) => {
                // Fails if the client has gone, as the writes then do.
                let _ = reply.send(Ok(()));
                let written = write(&prepared, &chunks);
                // The client may ask for another backup once it has the end of this one.
                drop((prepared, permit));
                // Fails if the client has gone.
                let _ = chunks.blocking_send(written.map(|()| Bytes::new()));
            }
            Err(error) => drop((reply.send(Err(error)), permit)),
        }
    });
    // Dropped without a message by a panic.
    prepared
        .await
        .map_err(|_| Problem::from(NoResult::Panicked(Panicked)))??;
    let mut response = Body::from_stream(stream::unfold(received, next_chunk)).into_response();
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/zstd"),
    );
    headers.insert(
        header::CONTENT_DISPOSITION,
        HeaderValue::from_static("attachment; filename=\"gw-backup.tar.zst\""),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// A chunk of the archive; an empty one is its end.
type Chunk = io::Result<Bytes>;

fn write(prepared: &backup::PreparedBackup, chunks: &mpsc::Sender<Chunk>) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(CHUNK, ChunkWriter(chunks.clone()));
    let written = prepared.write(&mut out).and_then(|()| out.flush());
    if let Err(error) = &written
        && !chunks.is_closed()
    {
        tracing::error!(%error, "a backup could not be read to its end");
    }
    written
}

/// The next chunk, up to the end. Without the end the response is cut, so that the client sees it.
async fn next_chunk(mut received: mpsc::Receiver<Chunk>) -> Option<(Chunk, mpsc::Receiver<Chunk>)> {
    match received.recv().await {
        Some(Ok(end)) if end.is_empty() => None,
        Some(chunk) => Some((chunk, received)),
        None => Some((Err(io::Error::other("the backup ended early")), received)),
    }
}

/// Sends what is written. Blocks while the client does not read.
struct ChunkWriter(mpsc::Sender<Chunk>);

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !bytes.is_empty() {
            let sent = self.0.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
            sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
