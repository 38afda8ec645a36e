//! An S3-compatible server (s3s-fs) on a port of this machine, which a test can make unreachable.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread::{self, JoinHandle};

use gw_shared::identity::secret::Secret;
use gw_shared::net::tls::Trusted;
use gw_telemetry::request_log::archive::ArchiveSettings;
use http::{Method, Request};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s_fs::FileSystem;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;

const BUCKET: &str = "logs";
const KEY_ID: &str = "GWTESTKEY";
const SECRET: &str = "secret/of+the=tests";

pub(crate) struct Server {
    folder: tempfile::TempDir,
    address: SocketAddr,
    /// Writes that are still accepted; negative while the server is away.
    writes_left: Arc<AtomicI64>,
    authority: Option<CertificateDer<'static>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::start_with(None)
    }

    /// As [`Self::start`], with TLS and a certificate of its own for `localhost`.
    pub(crate) fn start_tls() -> Self {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec!["localhost".to_owned()])
            .unwrap()
            .self_signed(&key)
            .unwrap();
        let authority = certificate.der().clone();
        let config = gw_bed::tls::server((authority.clone(), PrivateKeyDer::from(key)), &[]);
        Self::start_with(Some((TlsAcceptor::from(Arc::new(config)), authority)))
    }

    fn start_with(tls: Option<(TlsAcceptor, CertificateDer<'static>)>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(BUCKET)).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let mut service = S3ServiceBuilder::new(FileSystem::new(folder.path()).unwrap());
        service.set_auth(SimpleAuth::from_single(KEY_ID, SECRET));
        let service = service.build();
        let writes_left = Arc::new(AtomicI64::new(i64::MAX));
        let (stop, stopped) = oneshot::channel();
        let (acceptor, authority) = tls.unzip();
        let left = Arc::clone(&writes_left);
        let serve = move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(accept(listener, service, left, acceptor, stopped));
        };
        let thread = Some(thread::spawn(serve));
        Self {
            folder,
            address,
            writes_left,
            authority,
            stop: Some(stop),
            thread,
        }
    }

    /// Settings of a gateway with this archive.
    pub(crate) fn settings(&self) -> ArchiveSettings {
        let endpoint = match &self.authority {
            None => format!("http://{}", self.address),
            Some(_) => format!("https://localhost:{}", self.address.port()),
        };
        let trusted = |authority| Arc::new(Trusted::only(vec![authority]).unwrap());
        ArchiveSettings {
            bucket: BUCKET.to_owned(),
            prefix: "some/prefix".to_owned(),
            endpoint: Some(endpoint),
            region: "eu-test-1".to_owned(),
            access_key_id: KEY_ID.to_owned(),
            secret_key: Secret::new(SECRET.to_owned()),
            secret_key_file: None,
            session_token: None,
            authorities: self.authority.clone().map(trusted),
            path_style: true,
            bytes_per_second: 1 << 30,
        }
    }

    /// The table `[archive]` of a configuration, with the secret in `folder`.
    pub(crate) fn configuration(&self, folder: &Path, secret: Option<&str>) -> String {
        let file = folder.join("secret");
        fs::write(&file, secret.unwrap_or(SECRET)).unwrap();
        format!(
            "[archive]\nurl = \"s3://{BUCKET}/some/prefix\"\nendpoint = \"http://{}\"\n\
             access_key_id = \"{KEY_ID}\"\nsecret_key_file = \"{}\"\n",
            self.address,
            file.display()
        )
    }

    /// Refuses connections from now on.
    pub(crate) fn leave(&self) {
        self.writes_left.store(-1, Ordering::SeqCst);
    }

    /// Serves all requests, but leaves after so many writes.
    pub(crate) fn leave_after(&self, writes: i64) {
        self.writes_left.store(writes, Ordering::SeqCst);
    }

    pub(crate) fn come_back(&self) {
        self.writes_left.store(i64::MAX, Ordering::SeqCst);
    }

    /// Folder with the objects of the archive.
    pub(crate) fn objects_folder(&self) -> PathBuf {
        self.folder.path().join(BUCKET).join("some/prefix")
    }

    /// Names of all objects of the archive that end with `suffix`.
    pub(crate) fn objects(&self, suffix: &str) -> BTreeSet<String> {
        let top = self.objects_folder();
        let mut names = BTreeSet::new();
        let mut folders = vec![top.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.to_str().unwrap().ends_with(suffix) {
                    names.insert(
                        path.strip_prefix(&top)
                            .unwrap()
                            .to_str()
                            .unwrap()
                            .to_owned(),
                    );
                }
            }
        }
        names
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

async fn accept(
    listener: std::net::TcpListener,
    service: S3Service,
    writes_left: Arc<AtomicI64>,
    tls: Option<TlsAcceptor>,
    mut stopped: oneshot::Receiver<()>,
) {
    let listener = TcpListener::from_std(listener).unwrap();
    loop {
        let connection = tokio::select! {
            accepted = listener.accept() => accepted.unwrap().0,
            _ = &mut stopped => return,
        };
        let service = service.clone();
        let left = Arc::clone(&writes_left);
        let tls = tls.clone();
        tokio::spawn(async move {
            match tls {
                Some(tls) => {
                    let Ok(connection) = tls.accept(connection).await else {
                        return;
                    };
                    serve(connection, service, left).await;
                }
                None => serve::<TcpStream>(connection, service, left).await,
            }
        });
    }
}

async fn serve<C: AsyncRead + AsyncWrite + Unpin>(
    connection: C,
    service: S3Service,
    left: Arc<AtomicI64>,
) {
    let service = service_fn(move |request: Request<Incoming>| {
        let service = service.clone();
        let left = Arc::clone(&left);
        async move {
            let cost = i64::from(request.method() == Method::PUT);
            let is_away = left.fetch_sub(cost, Ordering::SeqCst) < cost;
            if is_away {
                left.store(-1, Ordering::SeqCst);
                // Ends the connection.
                return Err(io::Error::other("away"));
            }
            service
                .call(request.map(s3s::Body::from))
                .await
                .map_err(|error| io::Error::other(format!("{error:?}")))
        }
    });
    // The error of a connection concerns its client.
    let _ = http1::Builder::new()
        .serve_connection(TokioIo::new(connection), service)
        .await;
}
