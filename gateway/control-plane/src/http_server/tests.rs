//! Tests of bounds on bodies.

use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::post;
use hyper::service::Service;

use super::*;

#[tokio::test]
async fn a_body_that_waits_for_room_in_vain_is_told_to_come_again() {
    const BYTES: usize = 2 * limits::SMALL_BODY;
    const SOON: Duration = Duration::from_millis(20);
    let router = Router::new().route("/", post(|_: Bytes| async {}));
    let no_room = || (StatusCode::SERVICE_UNAVAILABLE, NO_ROOM).into_response();
    let router = with_bounded_bodies(router, BYTES, BYTES, SOON, no_room);
    let service = TowerToHyperService::new(router);
    let send = |body: Body| {
        let request = Request::post("/").body(body).unwrap();
        Box::pin(service.call(request))
    };
    let endless = || Body::from_stream(stream::pending::<Result<Bytes, BoxError>>());
    let mut holder = send(endless());
    // Holds the room until it is polled again.
    assert!(futures_util::poll!(&mut holder).is_pending());
    let waited = send(Body::from(vec![0; BYTES])).await.unwrap();
    assert_eq!(waited.status(), StatusCode::SERVICE_UNAVAILABLE);
    let late = holder.await.unwrap();
    assert_eq!(late.status(), StatusCode::BAD_REQUEST);
    let small = send(Body::from(vec![0; limits::SMALL_BODY])).await.unwrap();
    assert_eq!(small.status(), StatusCode::OK);
}
