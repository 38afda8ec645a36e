//! One connection to PostgreSQL, opened on demand. Calls block, and every call has a time limit.

use std::collections::HashMap;
use std::error::Error as _;
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Statement};

use super::primaries::{PRIMARY, Primary, REVISION};
use super::settings::{PostgresSettings, with_cause};
use crate::StoreError;

/// Longest call that is not a transfer of many rows. TCP keep-alive does not notice a stopped
/// server in time.
pub(crate) const CALL: Duration = Duration::from_secs(1);
/// Longest search for the primary among all hosts.
const CONNECT: Duration = Duration::from_secs(3);
/// Calls fail at once for this long after a failed attempt to connect.
const CONNECT_PAUSE: Duration = Duration::from_millis(250);
/// Asks for notifications about new revisions.
const LISTEN: &str = "LISTEN gw";
/// Limits on the server, for statements that outlive their client.
const SESSION: &str =
    "SET statement_timeout = '10s'; SET idle_in_transaction_session_timeout = '10s'";

/// A connection to the primary. A broken connection is replaced by the next call.
pub(crate) struct Engine {
    settings: PostgresSettings,
    /// `application_name` of the session.
    name: String,
    session: Option<SqlSession>,
    /// End of the time for calls and attempts to connect, if they have one together.
    deadline: Option<Instant>,
    /// The last failure to connect, and until when it is the answer to calls.
    paused: Option<(Instant, String)>,
    /// Runs the task of the connection, which makes progress only during calls. `None` only while
    /// this is dropped.
    runtime: Option<Runtime>,
}

/// An open connection and its prepared statements.
pub(crate) struct SqlSession {
    pub(crate) client: Client,
    statements: HashMap<&'static str, Statement>,
    /// The server. `None` for a standby, and if it does not tell.
    pub(crate) primary: Option<Primary>,
    /// The session asked for notifications.
    is_listening: bool,
    events: Arc<ServerEvents>,
}

/// What the server sent besides results.
#[derive(Default)]
struct ServerEvents {
    /// A commit is not confirmed by the synchronous standby.
    is_unreplicated: AtomicBool,
    /// A notification arrived, or the connection has ended.
    notified: Notify,
}

impl SqlSession {
    /// The prepared statement of `sql`.
    pub(crate) async fn prepare(
        &mut self,
        sql: &'static str,
    ) -> Result<Statement, tokio_postgres::Error> {
        if let Some(statement) = self.statements.get(sql) {
            return Ok(statement.clone());
        }
        let statement = self.client.prepare(sql).await?;
        self.statements.insert(sql, statement.clone());
        Ok(statement)
    }

    /// Whether a commit since the last question was not confirmed by the synchronous standby:
    /// PostgreSQL reports success with a warning when the wait for the standby is cancelled.
    pub(crate) fn take_unreplicated(&self) -> bool {
        self.events.is_unreplicated.swap(false, Ordering::Relaxed)
    }
}

impl Engine {
    pub(crate) fn new(
        settings: PostgresSettings,
        name: impl Into<String>,
    ) -> Result<Self, StoreError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        Ok(Self {
            settings,
            name: name.into(),
            session: None,
            deadline: None,
            paused: None,
            runtime: Some(runtime),
        })
    }

    /// Limits later calls together, and their attempts to connect; `None` ends the limit.
    pub(crate) fn end_by(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// `within`, or the time that is left if that is less.
    fn left(&self, within: Duration) -> Duration {
        self.deadline.map_or(within, |deadline| {
            within.min(deadline.saturating_duration_since(Instant::now()))
        })
    }

    /// Runs `work` on the connection; connects first if necessary. After a time-out or a broken
    /// connection the outcome is unknown ([`StoreError::Unavailable`]); any other error means that
    /// nothing was changed.
    pub(crate) fn call<T>(
        &mut self,
        within: Duration,
        work: impl AsyncFnOnce(&mut SqlSession) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, StoreError> {
        self.connect()?;
        let within = self.left(within);
        let (Some(session), Some(runtime)) = (&mut self.session, &self.runtime) else {
            return Err(unavailable("not connected"));
        };
        let result = runtime.block_on(async { timeout(within, work(session)).await });
        let error = match result {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => store_error(&error),
            Err(_) => unavailable(&format!("no answer within {within:.1?}")),
        };
        if matches!(error, StoreError::Unavailable(_) | StoreError::Pooled) {
            self.session = None;
        }
        Err(error)
    }

    /// Asks for notifications about new revisions, once on each connection.
    pub(crate) fn listen(&mut self) -> Result<(), StoreError> {
        self.call(CALL, async |session: &mut SqlSession| {
            if !session.is_listening {
                session.client.batch_execute(LISTEN).await?;
                session.is_listening = true;
            }
            Ok(())
        })
    }

    /// Waits until a notification arrives, the connection ends or `wake` is notified, at most
    /// `within`. Returns whether one of them happened.
    pub(crate) fn wait_for_notification(&self, within: Duration, wake: &Notify) -> bool {
        let (Some(session), Some(runtime)) = (&self.session, &self.runtime) else {
            return false;
        };
        runtime.block_on(async {
            let next = async {
                tokio::select! {
                    () = session.events.notified.notified() => {}
                    () = wake.notified() => {}
                }
            };
            timeout(within, next).await.is_ok()
        })
    }

    /// Whether there is a connection, and to the primary to use.
    pub(crate) fn is_connected(&self) -> bool {
        self.session.as_ref().is_some_and(|session| {
            let checked = self.settings.check_primary(session.primary.as_ref());
            checked.is_ok() && !session.client.is_closed()
        })
    }

    /// The primaries among all hosts, and the hosts that have not answered.
    pub(crate) fn primaries(&self) -> (Vec<Primary>, Vec<String>) {
        let (mut found, mut silent) = (Vec::new(), Vec::new());
        for host in self.settings.each_host(&self.name) {
            let session = async { timeout(CALL, self.open_at(&host)).await };
            match self.runtime.as_ref().map(|it| it.block_on(session)) {
                Some(Ok(Ok(session))) if session.primary.is_some() => found.extend(session.primary),
                Some(Ok(Err(error))) if takes_no_changes(&error) => {}
                _ => silent.push(host.0),
            }
        }
        (found, silent)
    }

    pub(crate) fn disconnect(&mut self) {
        self.session = None;
    }

    fn connect(&mut self) -> Result<(), StoreError> {
        if self.is_connected() {
            return Ok(());
        }
        self.session = None;
        if let Some((until, error)) = &self.paused
            && Instant::now() < *until
        {
            return Err(unavailable(error));
        }
        let Some(runtime) = &self.runtime else {
            return Err(unavailable("not connected"));
        };
        let within = self.left(CONNECT);
        match runtime.block_on(self.open(within)) {
            Ok(session) => {
                (self.session, self.paused) = (Some(session), None);
                Ok(())
            }
            Err(StoreError::Unavailable(error)) => {
                let error = format!("{}: {error}", self.settings.servers());
                let refused = unavailable(&error);
                if within == CONNECT {
                    self.paused = Some((Instant::now() + CONNECT_PAUSE, error));
                }
                Err(refused)
            }
            Err(error) => Err(error),
        }
    }

    /// Opens a session at the first host that fits, and is the primary to use.
    async fn open(&self, within: Duration) -> Result<SqlSession, StoreError> {
        let hosts = self.settings.each_host(&self.name);
        // So that every host that takes no connection leaves time for the others.
        let of_each = within / u32::try_from(hosts.len().max(1)).unwrap_or(u32::MAX);
        let mut failed = unavailable("no host");
        for host in hosts {
            let error = match timeout(of_each, self.open_at(&host)).await {
                Ok(Ok(session)) => match self.settings.note(session.primary.as_ref()) {
                    Ok(()) => return Ok(session),
                    Err(error) => error,
                },
                Ok(Err(error)) => unavailable(&with_cause(&error)),
                Err(_) => unavailable(&format!("cannot connect within {of_each:.1?}")),
            };
            // It says more than that another host does not answer.
            if !matches!(failed, StoreError::SeveralPrimaries(_)) {
                failed = error;
            }
        }
        Err(failed)
    }

    async fn open_at(&self, at: &(String, Config)) -> Result<SqlSession, tokio_postgres::Error> {
        let (host, config) = at;
        let (client, connection) = config.connect(self.settings.tls()).await?;
        let events = Arc::<ServerEvents>::default();
        tokio::spawn(run(connection, Arc::clone(&events)));
        client.batch_execute(SESSION).await?;
        // A server that does not tell counts as the only one.
        let answer = client.simple_query(PRIMARY).await.unwrap_or_default();
        let revision = client.simple_query(REVISION).await.unwrap_or_default();
        Ok(SqlSession {
            client,
            statements: HashMap::new(),
            primary: Primary::read(host, &answer, &revision),
            is_listening: false,
            events,
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A runtime that is dropped in a task of another runtime panics.
            runtime.shutdown_background();
        }
    }
}

/// Carries the bytes of one connection until it ends.
async fn run<S, T>(mut connection: Connection<S, T>, events: Arc<ServerEvents>)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
        match message {
            AsyncMessage::Notification(_) => events.notified.notify_one(),
            AsyncMessage::Notice(notice) if *notice.code() == SqlState::WARNING => {
                tracing::warn!(%notice, "PostgreSQL warns");
                events.is_unreplicated.store(true, Ordering::Relaxed);
            }
            _ => {}
        }
    }
    events.notified.notify_one();
}

fn unavailable(error: &str) -> StoreError {
    StoreError::Unavailable(error.to_owned())
}

fn store_error(error: &tokio_postgres::Error) -> StoreError {
    let text = with_cause(error);
    match error.code() {
        Some(&SqlState::DISK_FULL) => StoreError::Full,
        // The session has statements of another client, or has not those of this one.
        Some(&(SqlState::DUPLICATE_PSTATEMENT | SqlState::INVALID_SQL_STATEMENT_NAME)) => {
            StoreError::Pooled
        }
        Some(code) if !is_of_connection(code) => StoreError::Postgres(text),
        _ => StoreError::Unavailable(text),
    }
}

/// Whether the server is a standby, starts or ends, or no server listens at the address.
fn takes_no_changes(error: &tokio_postgres::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied};
    let cause = error.source().and_then(|it| it.downcast_ref::<io::Error>());
    // tokio-postgres has `PermissionDenied` for a standby, and Unix sockets `NotFound`.
    matches!(
        cause.map(io::Error::kind),
        Some(ConnectionRefused | NotFound | PermissionDenied)
    ) || error.code() == Some(&SqlState::CANNOT_CONNECT_NOW)
}

/// Whether a connection to another host, or a later one, may succeed: connection exceptions (08),
/// operator intervention (57P), and a primary that has become a standby (25006).
fn is_of_connection(code: &SqlState) -> bool {
    code.code().starts_with("08")
        || code.code().starts_with("57P")
        || *code == SqlState::READ_ONLY_SQL_TRANSACTION
}
